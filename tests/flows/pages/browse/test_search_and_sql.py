"""`tba browse`: its forms for trajectories and for SQL find what storage finds, and name what they cannot do."""

import re
from html import unescape
from pathlib import Path

import duckdb
import pytest

from flows.pages.browse import search
from flows.pages.browse.run_snapshot import RunSnapshot, TooLong
from storage.runs.run import Run
from tests.support.flows.site import Site, Whole, links, one, serve
from tests.support.storage.synthetic import STEPS, make_run

SLOW = "select sum(a.i * b.i) from range(10000000) a(i), range(10000000) b(i)"


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
