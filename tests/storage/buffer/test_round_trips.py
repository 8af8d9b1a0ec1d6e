"""Stored data is read back exactly, through the objects and all code that reads them."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import count
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.harness.fetched import fetched_of
from storage import layout
from storage.log.ledger import DRAWS_SCHEMA, ParquetLedger
from storage.log.prompts import read_prompts, write_prompts
from storage.log.shard_checks import read_shard
from storage.log.sync_records import Refusal, Shard, SyncRecord, decode, encode
from storage.log.trajectories import Trajectories
from storage.objects import parquet
from storage.queries.tables import decode_steps
from storage.runs.run import Run
from tba.types import Draw, Outcome, Prompt, StepRecord, Trajectory, Version
from tests.support.builders import as_stored, from_table, make_trajectory, rows_in, rows_of
from tests.support.storage.indexes import Sections, make_buffer
from tests.support.storage.step_values import steps

INT32 = st.integers(0, 2**31 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
NAMES = count()  # each example writes under its own name

one_run = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def run(tmp_path: Any) -> Run:
    return Run.create(str(tmp_path), "first", config={}, sampler_sql="", code_version="")


# --- trajectories: append, admission, fetch ---------------------------------------------------------------------------


@st.composite
def trajectories(draw: st.DrawFn, searcher: int) -> Trajectory:
    """Draw any trajectories that a searcher may append."""
    length = draw(st.integers(0, 4))
    logps = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=length, max_size=length)
    return make_trajectory(
        draw(TEXT),
        tokens=draw(st.lists(INT32, min_size=length, max_size=length)),
        reward=draw(st.floats(-1e100, 1e100)),
        searcher=searcher,
        slot=draw(INT32),
        prompt=draw(TEXT),
        response=draw(TEXT),
        prompt_tokens=tuple(draw(st.lists(INT32, min_size=1, max_size=4))),
        behaviour_logps=tuple(draw(logps)),
        ref_logps=tuple(draw(logps)),
        loss_mask=draw(st.none() | st.tuples(*[st.booleans()] * length)),
        **draw(steps(length)),
        reward_parts=draw(st.dictionaries(TEXT, NUMBER, max_size=2)),
        finished=draw(st.booleans()),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
    )


@one_run
@given(
    first=st.lists(trajectories(searcher=0), min_size=1, max_size=4),
    second=st.lists(trajectories(searcher=1), min_size=1, max_size=4),
)
def test_what_was_appended_is_what_is_admitted_and_fetched(run: Run, first: list[Trajectory], second: list[Trajectory]):
    run = Run.create(run.root, f"run{next(NAMES)}", config={}, sampler_sql="", code_version="")
    expected: dict[str, Trajectory] = {}
    for searcher, appended in enumerate((first, second)):
        key = Trajectories(run).append(searcher, 0, appended)
        named = as_stored([replace(t, searcher=searcher, round=0) for t in appended])
        assert from_table(read_shard(run.name, key, run.store.read(key))) == list(named.values())
        expected |= named
    sections = Sections(prompts_per_step=1, responses_per_prompt=1, inv_temp=1.0, needs_values=True)
    buffer = make_buffer(run, sections)
    assert buffer.sync(0, step=0) == len(expected)
    fetched = buffer.fetch([make_draw(name) for name in reversed(expected)])
    wanted = fetched_of(list(reversed(expected.values())))
    assert rows_of(fetched) == rows_of(wanted)
    assert rows_in(fetched.step_ends) == rows_in(wanted.step_ends)
    assert rows_in(fetched.step_values) == rows_in(wanted.step_values)


def make_draw(trajectory_id: str, step: int = 1, slot: int = 0, weight: float = 0.5, age: int = 0) -> Draw:
    return Draw(
        step=step,
        slot=slot,
        position=0,
        trajectory_id=trajectory_id,
        prompt_id="a",
        branch="recent",
        weight=weight,
        age=age,
    )


# --- prompts, records, ledger -----------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | NUMBER | TEXT,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(TEXT, inner, max_size=2),
    max_leaves=4,
)
PROMPT = st.builds(
    Prompt,
    prompt_id=TEXT,
    text=TEXT,
    tokens=st.lists(INT32, max_size=4).map(tuple),
    answer=TEXT,
    metadata=st.dictionaries(TEXT, JSON, max_size=2),
)


@one_run
@given(prompts=st.lists(PROMPT, max_size=4, unique_by=lambda prompt: prompt.prompt_id))
def test_prompts_come_back_exactly(run: Run, prompts: list[Prompt]):
    split = f"split{next(NAMES)}"
    write_prompts(run, split, prompts)
    assert read_prompts(run, split) == prompts


SHARD = st.builds(Shard, key=TEXT, searcher=INT32, seq=INT32, rows=INT32, bytes=INT32, sha256=TEXT)


@given(
    sync=INT32,
    step=INT32,
    attempt=INT32,
    shards=st.lists(SHARD, max_size=3),
    previous=st.none() | TEXT,
    refused=st.lists(st.builds(Refusal, key=TEXT, reason=TEXT), max_size=2),
    created_at=TEXT,
)
def test_sync_records_come_back_exactly(
    sync: int,
    step: int,
    attempt: int,
    shards: list[Shard],
    previous: str | None,
    refused: list[Refusal],
    created_at: str,
):
    record = SyncRecord(
        sync=sync,
        step=step,
        attempt=attempt,
        shards=shards,
        rows=sum(shard.rows for shard in shards),
        previous_sha256=previous,
        refused=refused,
        created_at=created_at,
    )
    assert decode(encode(record), "a record") == record


DRAWN = st.tuples(TEXT, NUMBER, INT32, NUMBER | st.none(), NUMBER | st.none(), NUMBER)
METRICS = st.dictionaries(st.sampled_from(["loss", "lr", "something_new"]), NUMBER)


@one_run
@given(steps=st.lists(st.tuples(st.lists(DRAWN, min_size=1, max_size=3), METRICS), min_size=1, max_size=3))
def test_the_ledger_comes_back_exactly(run: Run, steps: Sequence[Any]):
    sync = next(NAMES) + 1
    written = []
    for step, (drawn, metrics) in enumerate(steps, start=1):
        draws, outcomes = [], []
        for slot, (name, weight, age, residual, log_z, logp) in enumerate(drawn):
            draws.append(make_draw(name, step, slot, weight, age))
            found = {"residual": residual, "log_z": log_z, "logp": logp, "ref_logp": -logp, "advantage": age / 3}
            outcomes.append(Outcome(slot=slot, position=0, **found))
        written.append(
            StepRecord(
                step=step, sync=sync, version=Version(sync - 1, 1), draws=draws, outcomes=outcomes, metrics=metrics
            )
        )
    ParquetLedger(run, 1).write(sync, written, weights_sha256="ab")

    key = layout.draws(sync, 1)
    assert parquet.decode(run.store.read(key), key, DRAWS_SCHEMA).to_pylist() == [
        {**asdict(draw), **asdict(outcome)}
        for record in written
        for draw, outcome in zip(record.draws, record.outcomes, strict=True)
    ]
    found = decode_steps(run.store.read(layout.steps(sync, 1)), "steps").to_pylist()
    assert [row["step"] for row in found] == [record.step for record in written]
    for row, record in zip(found, written, strict=True):
        for name in ("loss", "lr", "something_new"):
            assert row.get(name) == record.metrics.get(name)
