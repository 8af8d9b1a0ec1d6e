import math
from pathlib import Path
from uuid import UUID

import duckdb
import pyarrow as pa
import pytest

from storage.buffer.sampler import check_sampler, default_sampler
from storage.log.schema import content_hash
from tba.errors import ConfigError
from tba.types import Version
from tests.support.builders import make_shard, make_trajectory
from tests.support.storage.indexes import admit, make_index, used
from tests.support.storage.oracle import u

NEWEST_FIRST = """
-- the newest responses of the prompts with the best average
with best as (
    select prompt_id, avg(reward) as mean from pool group by prompt_id order by mean desc, prompt_id limit $slots
  ),
  numbered as (select prompt_id, row_number() over (order by mean desc, prompt_id) - 1 as slot from best)
select slot, row_number() over (partition by slot order by ord desc) - 1 as position, trajectory_id, prompt_id,
  'prioritised' as branch, 1 / count(*) over (partition by slot) as weight
from pool join numbered using (prompt_id)
qualify position < $responses;
"""

ROW = "0 as slot, 0 as position, '0/0/0' as trajectory_id, 'a' as prompt_id, 'recent' as branch, 1.0 as weight"

READS = "it can read pool, front, queue, turns"

REFUSED = {
    "": "it must be one SELECT, got nothing",
    "selec 1": "syntax error",
    "delete from pool": "it must be one SELECT, got DELETE",
    f"select {ROW}; select 1": "it must be one SELECT, got SELECT, SELECT",
    "select 1 as slot, 2 as position": "it must return a column 'trajectory_id'; it returns slot, position",
    f"select {ROW} from trajectories": "trajectories",
    f"select {ROW} where $temperature > 1": "unknown parameter $temperature; known: $seed, $step",
    f"select {ROW} where random() < 2": "random() is not repeatable",
    f"with a as (select uuid()) select {ROW} from a": "uuid() is not repeatable",
    f"select {ROW} where now() > '2020-01-01'::timestamptz": "now() is not repeatable",
    f"select {ROW} from pool using sample 3": "SAMPLE are not repeatable",
    f"select {ROW} where current_timestamp > '2020-01-01'::timestamptz": "current_timestamp is not repeatable",
    f"select {ROW} where Current_Date > '2020-01-01'::date": "current_date is not repeatable",
    f"select {ROW} where localtime is not null": "localtime is not repeatable",
    f"select {ROW} where current_localtimestamp() is not null": "current_localtimestamp() is not repeatable",
    f"select {ROW} where age('2020-01-01'::timestamp) > interval 1 day": "age() is not repeatable",
    f"select {ROW} where ago(interval 1 day) is not null": "ago() is not repeatable",
    f"select {ROW} where pg_conf_load_time() is not null": "pg_conf_load_time() is not repeatable",
    f"select {ROW} where hash(1) > 2": "hash() is not repeatable",
    f"select {ROW} where version() > 'v1'": "version() is not repeatable",
    f"select {ROW} where current_setting('threads')::int > 0": "current_setting() is not repeatable",
    f"select {ROW} where getvariable('x') is null": "getvariable() is not repeatable",
    f"select {ROW} where (select approx_quantile(ord, 0.5) from pool) > 0": "approx_quantile() is not repeatable",
    f"select {ROW} where (select reservoir_quantile(ord, 0.5) from pool) > 0": "reservoir_quantile() is not repeatable",
    f"select {ROW} from read_csv('/etc/passwd')": f"{READS}, not read_csv(…)",
    f"select {ROW} from '/etc/passwd'": f"{READS}, not /etc/passwd",
    f"select {ROW} from query('select random() as r') where r < 2": f"{READS}, not query(…)",
    f"select {ROW} from query_table('pool')": f"{READS}, not query_table(…)",
    f"select {ROW}, (select count(*) from duckdb_memory()) as n": f"{READS}, not duckdb_memory(…)",
    f"select {ROW} from information_schema.tables": f"{READS}, not information_schema.tables",
    f"with tables as (select 1) select {ROW} from information_schema.tables": "not information_schema.tables",
    f"select {ROW} from (show tables)": "not what SHOW and DESCRIBE return",
    "pivot pool on reward using count(*)": "it must be one SELECT, got",
}


@pytest.mark.parametrize("sql", REFUSED)
def test_a_sampler_that_cannot_work_is_refused_before_anything_starts(sql: str):
    with pytest.raises(ConfigError) as refused:
        check_sampler(sql)
    assert str(refused.value).startswith("sampler SQL: ")
    assert REFUSED[sql] in str(refused.value)


ACCEPTED = {
    "ours": default_sampler(),
    "a user's": NEWEST_FIRST,
    "of its own queries": f"with recursive n as (select 0 as i union select 1 from N) select {ROW} from n",
    "that makes nothing of any example": f"select {ROW} from pool where prompt_id::int > 0",
}


@pytest.mark.parametrize("kind", ACCEPTED)
def test_a_sampler_that_works_is_accepted(kind: str):
    check_sampler(ACCEPTED[kind])


@pytest.mark.parametrize(
    ("order", "ambiguous"),
    [("order by ord desc", "order by reward desc"), ("order by ord desc", ""), ("mean desc, prompt_id", "mean desc")],
)
def test_a_sampler_that_draws_what_happens_to_lie_first_is_refused(order: str, ambiguous: str):
    assert order in NEWEST_FIRST
    with pytest.raises(ConfigError, match="depends on the order in which rows happen to lie"):
        check_sampler(NEWEST_FIRST.replace(order, ambiguous))


ROWS = 250_000
ONE_PROMPT = pa.table(
    {
        "prompt_id": ["a"] * ROWS,
        "content_hash": [f"{row:032x}" for row in range(ROWS)],
        "reward": [math.sqrt(row) / 100 for row in range(ROWS)],
        "length": [5] * ROWS,
        "finished": [True] * ROWS,
        "version_start": [0] * ROWS,
        "version_start_attempt": [1] * ROWS,
    }
)
"""More rows than a thread takes at a time. The sum of their rewards depends on the order of addition."""


@pytest.mark.parametrize("table", ["front", "pool"])
def test_draws_and_their_weights_do_not_depend_on_the_number_of_threads(table: str):
    drawn = []
    for threads in (1, 2, 4, 8):
        sql = default_sampler().replace("join front", f"join {table} as front")
        index = make_index(
            slots=1, responses=8, recent_share=0.0, inv_temp=1.0, capacity=ROWS, threads=threads, sampler_sql=sql
        )
        index.extend(0, [("0/0", ONE_PROMPT)], step=0)
        drawn.append(index.draw(9))
    assert drawn == drawn[:1] * 4


def test_a_users_sampler_replaces_ours():
    index = make_index(slots=2, responses=2, sampler_sql=NEWEST_FIRST)
    admit(index, 0, make_shard({"a": [0.0, 0.0, 0.1], "b": [1.0, 1.0], "c": [0.5, 0.5, 0.5]}))
    draws = index.draw(1)
    assert [(d.slot, d.position, d.trajectory_id, d.prompt_id) for d in draws] == [
        (0, 0, "0/0/4", "b"), (0, 1, "0/0/3", "b"), (1, 0, "0/0/7", "c"), (1, 1, "0/0/6", "c"),
    ]  # fmt: skip
    assert used(index) == {"recent": set(), "prioritised": {"b", "c"}}


def values(*rows: tuple[object, ...]) -> str:
    listed = ", ".join(str(tuple("NULL" if v is None else v for v in row)).replace("'NULL'", "null") for row in rows)
    columns = "slot, position, trajectory_id, prompt_id, branch, weight"
    return f"select * from (values {listed}) as t({columns}) where $step > 1"


A = (0, 0, "0/0/0", "a", "recent", 0.5)
B = (0, 1, "0/0/1", "a", "recent", 0.5)

WRONG = {
    "too few rows": ((A,), "one row for every slot and position, got 0 for slot 0, position 1"),
    "a place twice": ((A, A, B), "got 2 for slot 0, position 0"),
    "a place that is not asked for": ((A, B, (1, 0, *A[2:])), "no such place in the batch: slot 1, position 0"),
    "two prompts in a slot": ((A, (0, 1, "0/0/2", "b", "recent", 0.5)), "slot 0: the rows of a slot must have one"),
    "two branches in a slot": ((A, (0, 1, "0/0/1", "a", "prioritised", 0.5)), "one prompt and one branch"),
    "a row nobody stored": ((A, (0, 1, "0/9/0", "a", "recent", 0.5)), "no trajectory '0/9/0' was admitted"),
    "a row beyond its shard": ((A, (0, 1, "0/0/7", "a", "recent", 0.5)), "no trajectory '0/0/7' was admitted"),
    "no id at all": ((A, (0, 1, "first", "a", "recent", 0.5)), "no trajectory 'first' was admitted"),
    "another prompt's row": ((A, (0, 1, "0/0/2", "a", "recent", 0.5)), "'0/0/2' is not of prompt 'a'"),
    "a prompt nobody knows": (((*A[:3], "z", *A[4:]), (*B[:3], "z", *B[4:])), "'0/0/0' is not of prompt 'z'"),
    "another branch": (((*A[:4], "new", 1.0), B), "branch must be one of recent, prioritised, got 'new'"),
    "a missing value": (((*A[:2], None, *A[3:]), B), "column 'trajectory_id' is null"),
    "a negative weight": (((*A[:5], -1.0), B), "weight must be a number >= 0"),
    "a slot that is no number": ((("x", *A[1:]), ("y", *B[1:])), "not a row of slot, position"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_a_draw_that_is_not_a_batch_is_refused_by_step_and_fault(fault: str):
    rows, message = WRONG[fault]
    index = make_index(slots=1, responses=2, sampler_sql=values(*rows))
    admit(index, 0, make_shard({"a": [0.0, 1.0], "b": [0.0]}))
    with pytest.raises(ConfigError) as refused:
        index.draw(7)
    assert "sampler SQL: step 7" in str(refused.value)
    assert message in str(refused.value)


ROW_TYPES = {
    "trajectory_id": "VARCHAR", "searcher": "INTEGER", "seq": "INTEGER", "row": "INTEGER", "prompt_id": "VARCHAR",
    "prompt": "INTEGER", "content": "UUID", "ord": "BIGINT", "sync": "INTEGER", "reward": "DOUBLE",
    "length": "INTEGER", "finished": "BOOLEAN", "version_start": "INTEGER", "version_start_attempt": "INTEGER",
    "version_step": "INTEGER",
}  # fmt: skip
PROMPT_TYPES = {"branch": "VARCHAR", "prompt_id": "VARCHAR", "prompt": "INTEGER"}
TYPES = {
    "pool": ROW_TYPES,
    "front": ROW_TYPES,
    "queue": {**PROMPT_TYPES, "used": "BOOLEAN"},
    "turns": {**PROMPT_TYPES, "turn": "INTEGER"},
}


@pytest.mark.parametrize("name", TYPES)
def test_what_a_sampler_reads_of_a_trajectory_is_what_was_admitted(name: str):
    reading = f"with sampler as ({default_sampler()}), rest as (select * from {name}) select * from sampler"
    index = make_index(slots=2, sampler_sql=reading, step_of_version=lambda version: 5 * version.number)
    a = make_trajectory("a", tokens=(7, 2), reward=0.5, searcher=3, round=4, version_start=Version(6, 2))
    admit(index, 1, [a, make_trajectory("b", searcher=3, round=4, slot=1)])
    index.draw(40)
    found = index.tables.con.sql(f"select * from {name} where prompt_id = 'a' order by all")
    assert dict(zip(found.columns, map(str, found.types), strict=True)) == TYPES[name]
    row = dict(zip(found.columns, found.fetchall()[-1], strict=True))
    known = {
        "trajectory_id": "3/4/0", "searcher": 3, "seq": 4, "row": 0, "prompt_id": "a", "prompt": 0, "ord": 0, "sync": 1,
        "content": UUID(content_hash("a", (7, 2))), "reward": 0.5, "length": 2, "finished": True, "version_start": 6,
        "version_start_attempt": 2, "version_step": 30, "branch": "recent", "used": False,
    }  # fmt: skip
    assert {column: value for column, value in row.items() if column != "turn"} == {
        column: known[column] for column in TYPES[name] if column != "turn"
    }


def test_uniform_is_the_oracles_and_never_an_end_of_the_interval():
    index = make_index()
    texts = [f"0:response:{step}" for step in range(200)]
    found = [index.tables.con.execute("select uniform($text)", {"text": text}).fetchall()[0][0] for text in texts]
    assert found == [u(text) for text in texts]
    assert all(0 < it < 1 for it in found)
    assert (2**52 - 1 + 0.5) / 2**52 < 1  # the largest possible number


@pytest.mark.parametrize(
    "sql",
    ["select * from read_csv('{file}')", "copy pool to '{file}'", "install httpfs", "from oracle"],
)
def test_the_index_reaches_nothing_outside_itself(sql: str, tmp_path: Path):
    file = tmp_path / "here.csv"
    file.write_text("a\n1\n")
    sql = sql.format(file=file)
    oracle = pa.table({"a": [1]})  # local, because DuckDB finds only Python variables of the calling frame
    if sql == "from oracle":
        assert duckdb.connect().execute(sql).fetchall() == [(1,)]
    with pytest.raises(duckdb.Error, match=r"Permission|Catalog|disabled|not exist"):
        make_index().tables.con.execute(sql)
    assert len(oracle) == 1
    assert file.read_text() == "a\n1\n"
