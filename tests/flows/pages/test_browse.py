"""`tba browse`: its pages say what storage says, only permitted readers see them, and nothing in them runs."""

import http.client
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import duckdb
import pytest
from playwright.sync_api import Browser
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

import storage
from flows.cli import main
from flows.escaping import shown
from flows.pages.browse import search
from flows.pages.browse.batch import Drawn
from flows.pages.browse.guard import Door
from flows.pages.browse.response import Tokens
from flows.pages.browse.run_snapshot import RunSnapshot, TooLong
from flows.pages.browse.step_summary import agreement
from flows.pages.values import number
from storage import layout
from storage.log.trajectories import Trajectories
from storage.runs.run import Run
from storage.weights.versions import Versions
from tests.support.browser import open_page
from tests.support.builders import make_shard
from tests.support.flows.site import Site, Whole, serve
from tests.support.storage.synthetic import STEPS, SyntheticRun, copy_run, make_live_run, make_run

HOSTILE = (
    "</textarea></pre></title><script>document.title = 'owned'</script><img src=x onerror=alert(1)>'\"\u202ex\0y&amp;"
)
SLOW = "select sum(a.i * b.i) from range(10000000) a(i), range(10000000) b(i)"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("root")))


@pytest.fixture(scope="module")
def con(finished: Run) -> duckdb.DuckDBPyConnection:
    return storage.connect(finished)


@pytest.fixture(scope="module")
def site(finished: Run) -> Iterator[Site]:
    with serve(finished) as site:
        yield site


def one(con: duckdb.DuckDBPyConnection, query: str) -> tuple:
    [row] = con.execute(query).fetchall()
    return row


# --- what the pages say -----------------------------------------------------------------------------------------------


def test_every_link_leads_somewhere(site: Site):
    """Follow the links from the first page, up to three of each kind. Every page exists and is whole."""
    seen: set[str] = set()
    kinds: Counter[str] = Counter()
    ahead = ["/"]
    while ahead:
        path = ahead.pop(0)
        kind = path.split("/")[1].split("?")[0]
        if path in seen or kinds[kind] == 3:
            continue
        seen.add(path)
        kinds[kind] += 1
        status, _, body = site.ask(path)
        assert status in (200, 303), path
        Whole(body)
        ahead += links(body)
    expected = {"", "steps", "step", "trajectories", "trajectory", "version", "prompt", "sql", "refresh"}
    assert set(kinds) == expected


def links(body: str) -> list[str]:
    class Links(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.found += [value or "" for name, value in attrs if tag == "a" and name == "href"]

    parser = Links()
    parser.feed(body)
    return parser.found


def test_a_step_says_what_it_raised_and_lowered_most(site: Site, con: duckdb.DuckDBPyConnection):
    said = site.text("/step/7")
    draws, version = one(
        con, "select count(*), any_value(s.version) from draws join steps s using (step) where step = 7"
    )
    assert f"The step learned from {draws} draws" in said
    assert f"from version {version}" in said
    pushes = con.execute(
        "select trajectory_id, sum(advantage) as push, any_value(advantage) "
        "from learned_from(7) group by 1, slot order by 2"
    ).fetchall()
    lowest, highest = pushes[0], pushes[-1]
    body = site.ask("/step/7")[2]
    for word, (name, push, advantage) in (("raised", highest), ("lowered", lowest)):
        assert (push > 0) == (word == "raised")
        told = body.split(f">{word}</b>")[1].split("</p>")[0]
        assert f"/trajectory/{name}'" in told
        assert f"{number(abs(advantage))}</span>" in told


def test_a_target_is_shown_only_if_reward_and_log_z_agree_with_it():
    """The target is the log-ratio minus the residual. There is none if the residual does not fit the reward."""
    row = {
        "reward": 1.0,
        "log_z": 9.78,
        "logp": -1.0,
        "ref_logp": -1.7,
        "residual": 0.7 + 9.78 - 20.0,
        "advantage": 0.47,
    }
    assert Drawn(row, 4).target(0.05) == pytest.approx(20.0 - 9.78)
    assert Drawn(row, 4).push == pytest.approx(4 * 0.47)
    assert Drawn({**row, "residual": 1.0}, 4).target(0.05) is None
    assert Drawn({**row, "residual": None}, 4).target(0.05) is None
    assert Drawn({**row, "logp": None}, 4).log_ratio is None


def test_a_step_that_was_taken_twice_has_a_page_for_each_attempt(site: Site, con: duckdb.DuckDBPyConnection):
    losses = dict(con.execute("select attempt, loss from steps_all where step = 5").fetchall())
    assert set(losses) == {1, 2}
    assert "attempt 2 · also taken by attempt 1" in site.text("/step/5")
    assert "attempt 1, abandoned" in site.text("/step/5?attempt=1")
    assert site.ask("/step/5?attempt=3")[0] == 404


def test_a_trajectory_has_its_tokens_with_their_log_ratios(site: Site, con: duckdb.DuckDBPyConnection):
    name, tokens, mask = one(
        con,
        "select trajectory_id, response_tokens, loss_mask from trajectories where loss_mask is not null "
        "and trajectory_id in (select trajectory_id from draws) order by trajectory_id limit 1",
    )
    _, _, body = site.ask(f"/trajectory/{name}")
    spans = body.split("<pre class='tokens'>")[1].split("</pre>")[0].split("<span class='t ")[1:]
    assert [span.startswith("masked") for span in spans] == [not own for own in mask]
    for at, (span, token) in enumerate(zip(spans, tokens, strict=True)):
        assert f"token {at + 1} of {len(tokens)}, number {token}" in span
        if mask[at]:
            assert span.startswith("m10")  # the log-ratio, -0.5 - (-0.25), has the strongest colour below 0
            assert "log-ratio −0.25 = −0.5 − (−0.25)" in span
    for (step,) in con.execute("select distinct step from draws where trajectory_id = ?", [name]).fetchall():
        assert f"href='/step/{step}'" in body
    for (other,) in con.execute("select trajectory_id from group_of(?)", [name]).fetchall():
        assert f"/trajectory/{other}'" in body
    version, attempt = one(
        con, f"select version_start, version_start_attempt from trajectories where trajectory_id = '{name}'"
    )
    assert f"href='/version/{version}/{attempt}'" in body


def test_tokens_of_bytes_read_as_the_text_that_they_are_part_of(tmp_path: Path):
    run, said = make_run(str(tmp_path)), "naïve 漢字\n 🙂 ends"
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["naive ends"], BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    newest = Versions(run).complete()[-1]
    run.store.create(f"{layout.version(newest)}tokenizer.json", tokenizer.to_str().encode())
    numbers = tokenizer.encode(said).ids
    texts = Tokens(run).texts(numbers)
    assert texts is not None and "".join(texts) == said and len(numbers) > len(said.split())
    assert [texts[at] for at, it in enumerate(map(tokenizer.id_to_token, numbers)) if it == "Ċ"] == ["\n"]


@pytest.mark.parametrize(
    ("form", "condition"),
    [
        ({}, "true"),
        ({"reward_from": "1"}, "reward >= 1"),
        ({"searcher": "1", "version_from": "1", "version_to": "2"}, "searcher = 1 and version_start between 1 and 2"),
        ({"drawn": "yes"}, "trajectory_id in (select trajectory_id from draws)"),
        ({"drawn": "no", "age_to": "1"}, "age <= 1 and trajectory_id not in (select trajectory_id from draws)"),
        ({"text": "1+2", "in": "prompt"}, "true"),
        ({"text": "it's"}, "false"),
        ({"where": "seq = 2 or seq = 3 -- these", "reward_to": "0"}, "seq in (2, 3) and reward <= 0"),
    ],
)
def test_the_form_finds_what_sql_finds_and_shows_its_sql(
    site: Site, con: duckdb.DuckDBPyConnection, form: dict[str, str], condition: str
):
    (count,) = one(con, f"select count(*) from trajectories where {condition}")
    _, _, body = site.ask(site.link("/trajectories", **form))
    assert f">{count:,} trajector" in body
    query = body.split("<textarea")[1].split(">", 1)[1].split("</textarea>")[0]
    assert len(con.execute(unescape(query)).fetchall()) == count
    assert site.ask(site.link("/sql", query=unescape(query)))[0] == 200


def test_trajectories_are_chosen_without_the_texts_of_all_of_them(tmp_path: Path):
    """A search without words reads no texts. Then only the shards of the shown trajectories are opened."""
    snapshot = RunSnapshot(make_run(str(tmp_path)), 20.0)
    for form, reads in (({}, False), ({"reward_from": "1", "order": "drawn"}, False), ({"text": "3"}, True)):
        query = search.SELECTION.format(where=search.conditions(form), order="created_at")
        [[_, plan]] = snapshot.ask(f"explain {search.CHOSEN.format(query=query)}").rows
        assert ("response" in plan) == reads
    for path in Path(snapshot.run.url, "trajectories").rglob("*.parquet"):
        if path.name != "seq=00000003.parquet":
            path.unlink()
    assert search.read_texts(snapshot, ["0/3/1", "1/3/0"]) == dict.fromkeys(("0/3/1", "1/3/0"), ("1+2=", "3"))
    snapshot.close()


def test_a_step_tells_of_draws_whose_shard_is_gone(finished: Run, tmp_path: Path, con: duckdb.DuckDBPyConnection):
    run = copy_run(finished, tmp_path)
    (gone, drawn) = one(con, "select count(*) filter (trajectory_id like '0/0/%'), count(*) from draws where step = 1")
    assert 0 < gone < drawn
    Path(run.url, "trajectories/searcher=000/seq=00000000.parquet").unlink()
    with serve(run) as site:
        said = site.text("/step/1")
    assert f"The step learned from {drawn - gone} draws" in said
    assert f"{gone} draws are missing" in said


def test_a_slot_of_equal_rewards_is_pushed_if_the_baseline_is_not_the_mean_of_the_slot():
    def drawn(advantage: float, residual: float | None) -> Drawn:
        return Drawn({"reward": 1.0, "advantage": advantage, "residual": residual}, 1)

    for advantage, residual, said in ((0.4, None, False), (1e-8, None, True), (0.4, -8.0, True)):
        told = agreement([[drawn(advantage, residual), drawn(-advantage, residual)]])
        assert told.startswith("In its slot all rewards are equal")
        assert ("only the reference" in told) == said


def test_a_response_from_elsewhere_is_not_said_to_be_a_searchers(tmp_path: Path):
    run, elsewhere = make_live_run(str(tmp_path)), layout.imported("0" * 64)
    Trajectories(run).append(elsewhere, 0, make_shard({"train/0": [1.0, 0.0]}, searcher=elsewhere))
    with closing(storage.connect(run)) as con:
        (begun,) = one(con, "select count(*) from trajectories where version_start = 0 and searcher < 1000000000")
    with serve(run) as site:
        said = site.text(f"/trajectory/{elsewhere}/0/0")
        assert "imported" in said and "counts as a response of version 0" in said
        assert "by searcher" not in said and "began the response" not in said
        assert "began the response" in site.text("/trajectory/0/0/0")
        assert f"Searchers began {begun} trajectories with this version" in site.text("/version/0")


def test_pages_of_search_results_follow_each_other(site: Site, con: duckdb.DuckDBPyConnection):
    (count,) = one(con, "select count(*) from trajectories")
    found: list[str] = []
    for page in range(count // 50 + 1):
        body = site.ask(site.link("/trajectories", order="longest", page=str(page)))[2]
        found += [link for link in links(body) if link.startswith("/trajectory/")]
        assert ("after →" in body) == (page < count // 50)
    assert len(found) == len(set(found)) == count
    last = site.text(site.link("/trajectories", order="longest", page=str(count // 50)))
    assert site.text(site.link("/trajectories", order="longest", page="999")) == last


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("selec 1", "syntax error"),
        ("select nonsense from steps", "nonsense"),
        ("create view trajectories as select 1", "it begins with select"),
        ("select 1; select 2", "it begins with select"),
        ("pivot steps on version using avg(loss)", "a pivot names its values"),
        ("from '/etc/passwd.csv'", "disabled by configuration"),
        ("select getenv('HOME')", "getenv"),
        ("", ""),
    ],
)
def test_what_sql_cannot_do_is_said_beside_the_box(site: Site, query: str, said: str):
    status, _, body = site.ask(site.link("/sql", query=query))
    assert status == 200
    assert ("role='alert'" in body) == bool(said)
    assert said in body.split("role='alert'>")[-1]
    assert query.split("'")[0] in Whole(body).said


def test_a_query_is_answered_as_it_was_written(site: Site):
    """A query may end with a comment, repeat a column name, and have its own order."""
    body = site.ask(site.link("/sql", query='select 1 as a, 2 as a, 3 as "a "; -- all of them'))[2]
    assert re.findall(r"<td[^>]*>(\d)</td>", body) == ["1", "2", "3"]
    body = site.ask(site.link("/sql", query="from range(300) t(i) order by i desc", page="1"))[2]
    assert [int(it) for it in re.findall(r"<td[^>]*>(\d+)</td>", body)] == [*range(99, -1, -1)]
    assert "(line 2: frm steps)" in site.ask(site.link("/sql", query="select 1\nfrm steps"))[2]


def test_an_error_in_a_form_is_shown_beside_it(site: Site):
    orders = "'newest', 'oldest', 'highest', 'lowest', 'longest', 'shortest', 'drawn'"
    for form, said in (({"reward_from": "nan"}, "reward from must be a number, got 'nan'"),
                       ({"where": "nonsense"}, "nonsense"),
                       ({"page": "-1"}, "page must be a whole number from 0, got '-1'"),
                       ({"order": "x"}, f"order must be one of {orders}, got 'x'"),
                       ({"text": "a", "in": "x"}, "in must be one of '', 'prompt', 'both', got 'x'"),
                       ({"where": "true) having (false"}, "GROUP BY")):  # fmt: skip
        body = site.ask(site.link("/trajectories", **form))[2]
        assert said in unescape(body.split("role='alert'>")[1])


def test_a_query_that_takes_too_long_ends_and_the_next_is_answered(finished: Run):
    with serve(finished, seconds=0.5) as site:
        body = site.ask(site.link("/sql", query=SLOW))[2]
        assert "longer than 0.5 seconds" in body
        assert f"<td class='n'>{STEPS}</td>" in site.ask(site.link("/sql", query="select count(*) from steps"))[2]
        with pytest.raises(TooLong), site.snapshot.turn(), site.snapshot.turn():
            pass


@pytest.mark.parametrize(
    "path",
    ["/nothing", "/step/99", "/step/0x1", f"/step/{'9' * 30}", "/trajectory/9/9/9", "/version/77", "/prompt?id=none"],
)
def test_what_is_not_there_is_said_to_be_missing(site: Site, path: str):
    status, headers, body = site.ask(path)
    assert status == 404
    assert "default-src 'none'" in headers["content-security-policy"]
    assert "there is no" in Whole(body).said


@pytest.mark.long
@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_a_run_on_s3_has_the_same_pages(site: Site, con: duckdb.DuckDBPyConnection, root: str):
    [trajectory] = one(con, "select min(trajectory_id) from draws where step = 2")
    with serve(make_run(root)) as remote:
        for path in ("/steps", "/step/2", f"/trajectory/{quote(trajectory)}", "/trajectories?reward_from=1"):
            here, there = (re.sub(r"\d\d:\d\d:\d\d", "", it.text(path)) for it in (site, remote))
            assert here == there


def test_a_live_run_is_read_again_on_request(tmp_path: Path):
    run = make_live_run(str(tmp_path))
    with serve(run) as site:
        before = site.text("/trajectories")
        SyntheticRun.of(run).search(version=2)
        assert site.text("/trajectories") == before
        status, headers, _ = site.ask("/refresh?to=/trajectories")
        assert (status, headers["location"]) == (303, "/trajectories")
        assert site.text("/trajectories") != before
        for elsewhere in ("//example.org", "/\\example.org", "https://example.org", "/refresh"):
            assert site.ask(site.link("/refresh", to=elsewhere))[1]["location"] == "/"
        assert site.ask("/step/5")[0] == 404  # the record of its sync exists, its ledger does not


# --- who may look -----------------------------------------------------------------------------------------------------


def test_every_answer_tells_browsers_to_run_and_fetch_nothing(site: Site):
    for path in ("/", "/nothing", "/refresh"):
        _, headers, _ = site.ask(path)
        policy = headers["content-security-policy"]
        for part in ("default-src 'none'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'self'"):
            assert part in policy
        assert "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "server" not in headers


def test_only_reading_is_possible(site: Site):
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        status, headers, _ = site.ask("/", method)
        assert (status, headers["allow"]) == (405, "GET, HEAD")
    status, _, body = site.ask("/step/7", "HEAD")
    assert (status, body) == (200, "")


def test_a_name_that_is_not_this_machines_is_refused(site: Site):
    port = site.door.port
    for host in (f"127.0.0.1:{port}", f"localhost:{port}", f"LOCALHOST:{port}", f"[::1]:{port}"):
        assert site.ask("/", Host=host)[0] == 200
    for host in (
        "example.org",
        f"example.org:{port}",
        "localhost",
        f"localhost:{port + 1}",
        f"127.0.0.1.example.org:{port}",
        "",
    ):
        status, _, body = site.ask("/", Host=host)
        assert status == 421
        assert "first" not in Whole(body).said


def test_a_browser_leaves_out_the_port_of_http():
    assert {"localhost", "localhost:80", "127.0.0.1"} <= Door("127.0.0.1", 80, None, True).names
    assert "localhost" not in Door("127.0.0.1", 8080, None, True).names


def test_another_site_can_link_here_and_nothing_else(site: Site):
    crossed = {"Sec-Fetch-Site": "cross-site"}
    assert site.ask("/", **crossed, **{"Sec-Fetch-Mode": "navigate"})[0] == 200
    assert site.ask("/", **crossed, **{"Sec-Fetch-Mode": "no-cors"})[0] == 403
    assert site.ask("/refresh", **crossed, **{"Sec-Fetch-Mode": "navigate"})[0] == 403


def test_sql_of_another_sites_link_is_shown_and_not_run(site: Site):
    own = {"Sec-Fetch-Mode": "navigate", "Sec-Fetch-Site": "same-origin"}
    for page, wrote in (
        (site.link("/sql", query="select 7000000 + 777777 as found"), "select 7000000 + 777777 as found"),
        (site.link("/trajectories", where="reward > -99"), "reward > -99"),
    ):
        for foreign in ("cross-site", "same-site"):  # another port of this machine counts as the same site
            status, _, body = site.ask(page, **{**own, "Sec-Fetch-Site": foreign})
            assert status == 200 and wrote in unescape(body) and "press the button" in body
            assert "7777777" not in body.replace(",", "") and "/trajectory/" not in body
        for sent in (own, {}):
            assert "press the button" not in site.ask(page, **sent)[2]
    assert "7777777" in site.ask(site.link("/sql", query="select 7000000 + 777777 as found"), **own)[2].replace(",", "")


def test_beyond_this_machine_a_token_is_asked_for(finished: Run):
    with serve(finished, host="0.0.0.0") as site:
        token = site.door.token
        assert token
        assert len(token) > 40
        assert token in site.door.address
        cookie = f"{site.door.cookie}={token}"
        for path, headers in (
            ("/", {}), ("/?token=", {}), (f"/?token={token[:-1]}", {}), (f"/?token={quote('é')}", {}),
            ("/", {"Cookie": f"{site.door.cookie}="}), ("/", {"Cookie": f"{site.door.cookie}=\"x"}),
            ("/", {"Cookie": "a b;;="}),
        ):  # fmt: skip
            status, got, body = site.ask(path, **headers)
            assert status == 403
            assert "set-cookie" not in got
            assert "first" not in Whole(body).said
        status, got, body = site.ask(f"/step/7?token={token}&attempt=2")
        assert got["set-cookie"].startswith(f"{cookie};")
        assert "httponly" in got["set-cookie"].lower()
        assert "samesite=strict" in got["set-cookie"].lower()
        assert "0;url=/step/7?attempt=2" in body
        assert "Step" not in body
        assert site.ask("/step/7", Cookie=f"other=1; {cookie}", Host="machine.example.org")[0] == 200
        assert token not in site.ask("/", Cookie=cookie)[2]


def test_a_token_can_be_asked_for_on_this_machine_too(finished: Run):
    with serve(finished, with_token=True) as site:
        assert site.ask("/")[0] == 403
        assert site.ask(f"/?token={site.door.token}", Host="example.org")[0] == 421


# --- the command ------------------------------------------------------------------------------------------------------


def test_a_port_that_is_in_use_is_named(finished: Run, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["browse", finished.url, "--port", str(port)]) == 2
    assert f"error: --port: {port} is in use" in capsys.readouterr().err
    assert main(["browse", finished.url, "--host", "no such host"]) == 2
    assert "error: --host:" in capsys.readouterr().err


def test_ctrl_c_ends_it(finished: Run):
    command = [sys.executable, "-m", "flows.cli", "browse", finished.url, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    said = process.stdout.readline()
    assert said.startswith("first at http://127.0.0.1:")
    port = int(said.split(":")[2].split("/")[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/")  # before its first answer, the process might ignore signals
    assert connection.getresponse().read()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == 0
    connection.close()


# --- in a real browser ------------------------------------------------------------------------------------------------


def test_a_text_is_shown_as_it_is_and_what_is_invisible_by_name():
    assert shown("a<b>&\u202eb\0\ud800") == (
        "a&lt;b&gt;&amp;<span class='odd'>U+202E</span>b<span class='odd'>U+0000</span><span class='odd'>U+D800</span>"
    )
    assert shown("é 漢字 🙂\n\tx") == "é 漢字 🙂\n\tx"


@pytest.mark.parametrize("dark", [False, True])
def test_pages_are_as_wide_as_their_window_and_complain_of_nothing(site: Site, browser: Browser, dark: bool):
    paths = ("/", "/steps", "/trajectories", "/step/7", "/trajectory/0/2/1", "/version/2", "/prompt?id=train/0",
             "/sql?query=from+draws")  # fmt: skip
    with open_page(browser, dark=dark) as page:
        for path in paths:
            page.goto(site.url + path)
            for width in (400, 1280):
                page.set_viewport_size({"width": width, "height": 900})
                assert page.evaluate("document.documentElement.scrollWidth") <= width, path
            assert page.evaluate("getComputedStyle(document.body).maxWidth") == "1080px"  # the CSP permits the style


def test_a_reader_goes_from_a_choice_to_a_token_to_a_step_to_a_version_and_back(
    site: Site, browser: Browser, con: duckdb.DuckDBPyConnection
):
    with open_page(browser) as page:
        page.goto(site.url)
        page.get_by_role("link", name="Trajectories", exact=True).click()
        page.get_by_label("reward from").fill("1")
        page.get_by_label("drawn by a step").select_option("yes")
        page.get_by_role("button", name="Search").click()
        assert "reward >= 1" in page.locator("textarea").input_value()
        assert page.get_by_label("reward from").input_value() == "1"
        page.locator(".hits a").first.click()
        name = page.inner_text("h1").removeprefix("Trajectory ")
        reward, version = one(con, f"select reward, version_start from trajectories where trajectory_id = '{name}'")
        assert reward == 1
        token = page.locator(".t").first
        token.focus()
        assert "log-ratio" in page.evaluate("getComputedStyle(document.activeElement, '::after').content")
        (step,) = one(con, f"select min(step) from draws where trajectory_id = '{name}'")
        page.locator("table").first.get_by_role("link", name=str(step), exact=True).click()
        assert page.inner_text("h1") == f"Step {step}"
        assert page.locator(f"a[href='/trajectory/{name}']").count() > 0
        page.go_back()
        page.get_by_role("link", name=str(version), exact=True).first.click()
        assert page.inner_text("h1") == f"Version {version}"
        page.go_back()
        page.go_back()
        assert page.get_by_label("reward from").input_value() == "1"
        page.get_by_role("button", name="Run").click()
        assert page.locator("td a[href^='/trajectory/']").count() > 0


def test_what_a_model_writes_is_seen_and_never_runs(tmp_path: Path, browser: Browser):
    made = SyntheticRun(str(tmp_path), "nasty")
    made.says = HOSTILE
    run = made.finish().run
    doubled = HOSTILE.replace("'", "''")
    seen = HOSTILE.replace("\u202e", "U+202E").replace("\0", "U+0000")
    with serve(run) as site, open_page(browser) as page:
        for path in ("/step/7", "/trajectory/0/2/1", "/trajectories", site.link("/prompt", id="train/0"),
                     site.link("/trajectories", text=HOSTILE, where=f"response = '{HOSTILE}"),
                     site.link("/sql", query=f"select '{doubled}' as \"{HOSTILE[:20]}\"")):  # fmt: skip
            page.goto(site.url + path)
            assert page.title().endswith(" · nasty"), path
            assert page.locator("script, img").count() == 0
            assert seen[:60] in page.inner_text("body") or "where=" in path
        page.goto(f"{site.url}/trajectory/0/2/1")
        page.locator("summary", has_text="As text").click() if page.locator("summary").count() else None
        assert seen in page.inner_text("body")


def test_the_token_is_given_once_and_kept_by_the_browser(finished: Run, browser: Browser):
    with serve(finished, with_token=True) as site, open_page(browser) as page:
        page.goto(f"{site.url}/steps?token={site.door.token}")
        page.wait_for_url(f"{site.url}/steps")
        page.get_by_role("link", name=str(STEPS), exact=True).click()
        assert page.inner_text("h1") == f"Step {STEPS}"
        assert page.evaluate("document.cookie") == ""
