import pytest

from storage.sampler import check_sampler, default_sampler
from tba.errors import ConfigError
from tests.builders import make_shard
from tests.storage.indexes import admit, make_index
from tests.storage.oracle import u

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
    f"select {ROW} from read_csv('/etc/passwd')": "",
    f"select {ROW} from '/etc/passwd'": "",
}


@pytest.mark.parametrize("sql", REFUSED)
def test_a_sampler_that_cannot_work_is_refused_before_anything_starts(sql: str):
    with pytest.raises(ConfigError) as refused:
        check_sampler(sql)
    assert str(refused.value).startswith("sampler SQL: ")
    assert REFUSED[sql] in str(refused.value)


@pytest.mark.parametrize("sql", [default_sampler(), NEWEST_FIRST])
def test_a_sampler_that_works_is_accepted(sql: str):
    check_sampler(sql)


def test_a_users_sampler_replaces_ours():
    index = make_index(slots=2, responses=2, sampler_sql=NEWEST_FIRST)
    admit(index, 0, make_shard({"a": [0.0, 0.0, 0.1], "b": [1.0, 1.0], "c": [0.5, 0.5, 0.5]}))
    draws = index.draw(1)
    assert [(d.slot, d.position, d.trajectory_id, d.prompt_id) for d in draws] == [
        (0, 0, "0/0/4", "b"), (0, 1, "0/0/3", "b"), (1, 0, "0/0/7", "c"), (1, 1, "0/0/6", "c"),
    ]  # fmt: skip
    assert index.queues() == {"recent": [], "prioritised": ["b", "c"]}


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
    "two prompts in a slot": ((A, (0, 1, "0/0/2", "b", "recent", 0.5)), "slot 0: the rows of a slot must be of one"),
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


def test_uniform_is_the_oracles_and_never_an_end_of_the_interval():
    index = make_index()
    texts = [f"0:response:{step}" for step in range(200)]
    found = [index.con.execute("select uniform($text)", {"text": text}).fetchall()[0][0] for text in texts]
    assert found == [u(text) for text in texts]
    assert all(0 < it < 1 for it in found)
    assert (2**52 - 1 + 0.5) / 2**52 < 1  # the greatest there can be


def test_the_index_reaches_nothing_outside_itself():
    con = make_index().con
    unreachable = [
        "select * from read_csv('/etc/hostname')",
        "copy pool to '/tmp/x.csv'",
        "install httpfs",
        "from oracle",
    ]
    for sql in unreachable:
        with pytest.raises(Exception, match=r"Permission|Catalog|disabled|not exist"):
            con.execute(sql)
