"""`tba browse`: its pages say what storage says, and every link leads somewhere."""

import re
from collections import Counter
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import duckdb
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

import storage
from flows.pages.browse.batch import Batch, Drawn, beta_of_targets
from flows.pages.browse.response import Tokens
from flows.pages.browse.step_summary import agreement, extremes
from flows.pages.values import number
from storage import layout
from storage.log.trajectories import Trajectories
from storage.runs.run import Run
from storage.weights.evaluations import Evaluations
from storage.weights.versions import Versions
from tba.types import Score, Version
from tests.support.builders import make_example, make_shard
from tests.support.flows.site import Site, Whole, links, one, serve
from tests.support.storage.synthetic import SyntheticRun, copy_run, make_live_run, make_run


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


def test_a_step_says_how_its_attempt_computed_if_that_is_stored(site: Site):
    body = site.ask("/step/6?attempt=2")[2]
    assert [name for name in ("number format", "bfloat16", "threads") if name not in body] == []
    assert "number format" not in site.text("/step/6?attempt=1")


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


def test_a_step_tells_of_draws_whose_shard_is_gone(finished: Run, tmp_path: Path, con: duckdb.DuckDBPyConnection):
    run = copy_run(finished, tmp_path)
    (gone, drawn) = one(con, "select count(*) filter (trajectory_id like '0/0/%'), count(*) from draws where step = 1")
    assert 0 < gone < drawn
    Path(run.url, "trajectories/searcher=000/seq=00000000.parquet").unlink()
    with serve(run) as site:
        said = site.text("/step/1")
    assert f"The step learned from {drawn - gone} draws" in said
    assert f"{gone} draws are missing" in said


def test_a_step_with_a_behaviour_share_has_no_target_that_follows_from_the_reward():
    """With a small share, the target that the reward alone gives would be near, and wrong."""
    row = {"logp": -6.0, "ref_logp": -6.0, "reward": 0.0, "residual": 17.85, "log_z": 18.0, "advantage": 0.1, "slot": 0}
    for share, told in ((0.0, True), (0.3, False)):
        beta = beta_of_targets({"objective": {"behaviour_share": share}}, 0.05)
        [found, *_] = extremes(Batch([[Drawn(row, 1)]]), beta)
        assert (found["target"] is not None) == told
    assert beta_of_targets({"objective": {}}, 0.05) == 0.05  # a run that was stored without this setting


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


def test_a_version_shows_its_best_and_worst_responses_and_some_of_the_others(tmp_path: Path):
    """The rewards of the run's own responses are between 0 and 1."""
    run = make_live_run(str(tmp_path))
    rewards = {"best": [9.0, 8.0, 7.0], "random": [float(it) for it in range(2, 7)], "worst": [-7.0, -8.0, -9.0]}
    shard = make_shard({"train/0": [it for given in rewards.values() for it in given]}, searcher=7, version=1)
    Trajectories(run).append(7, 0, [replace(it, response=f"<b>{it.reward:g}</b>") for it in shard])
    scored = [make_example(Version(1, 1), step=2, response="<i>held out</i>")]
    score = Score(version=Version(1, 1), step=2, metric="greedy", value=1.0, n=1, seconds=0.0)
    Evaluations(run).write([score], scored)
    with serve(run) as site:
        body = site.ask("/version/1")[2]
    table = body.split("Examples of its responses")[1].split("</table>")[0]
    cells = [row.split("</td>") for row in table.split("<tr><td>")[1:]]
    shown = [(kind, float(re.sub("<.*?>", "", reward).replace("−", "-"))) for kind, reward, *_ in cells]
    assert [it for it in shown if it[0] != "random"] == [
        *(("best", it) for it in rewards["best"]), *(("worst", it) for it in rewards["worst"])
    ]  # fmt: skip
    assert sum(kind == "random" for kind, _ in shown) == 3
    assert all(-7 < reward < 7 for kind, reward in shown if kind == "random")
    assert "&lt;b&gt;9&lt;/b&gt;" in table and "<b>" not in table
    assert "&lt;i&gt;held out&lt;/i&gt;" in body and "<i>held" not in body


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
