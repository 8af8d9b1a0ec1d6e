import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import layout
from storage.log.ledger import DRAWS_SCHEMA, ParquetLedger
from storage.runs.run import Run
from tba.errors import Superseded
from tba.types import Draw, Outcome, StepRecord, Version

pytestmark = pytest.mark.parametrize("root", ["local"], indirect=True)


def make_draw(step: int, slot: int, position: int) -> Draw:
    return Draw(
        step=step,
        slot=slot,
        position=position,
        trajectory_id=f"0/0/{position}",
        prompt_id="a",
        branch="recent",
        weight=0.5,
        age=3,
    )


def make_record(step: int, *, sync: int = 3, **changes: Any) -> StepRecord:
    places = [(slot, position) for slot in range(2) for position in range(2)]
    fields: dict[str, Any] = {
        "version": Version(2, 1),
        "draws": [make_draw(step, *place) for place in places],
        "outcomes": [
            Outcome(slot=slot, position=position, advantage=-0.02, residual=0.1, log_z=1.5, logp=-2.0, ref_logp=-2.5)
            for slot, position in places
        ],
        "metrics": {"loss": step / 10, "lr": 3e-4},
    }
    return StepRecord(step=step, sync=sync, **{**fields, **changes})


def read(run: Run, key: str) -> pa.Table:
    return pq.read_table(io.BytesIO(run.store.read(key)))


def write(run: Run, records: Sequence[StepRecord], *, sync: int = 3, attempt: int = 1) -> None:
    ParquetLedger(run, attempt).write(sync, records, weights_sha256="cd" * 32)


def test_every_drawn_row_is_kept_with_what_was_found(run: Run):
    write(run, [make_record(5), make_record(6)])
    draws = read(run, layout.draws(3, 1))
    assert draws.schema.equals(DRAWS_SCHEMA)
    assert len(draws) == 8
    assert draws.slice(7).to_pylist() == [
        {
            "step": 6, "slot": 1, "position": 1, "trajectory_id": "0/0/1", "prompt_id": "a", "branch": "recent",
            "weight": 0.5, "age": 3, "residual": 0.1, "log_z": 1.5, "logp": -2.0, "ref_logp": -2.5,
            "advantage": -0.02,
        }
    ]  # fmt: skip


def test_every_step_is_kept_with_what_was_measured(run: Run):
    write(run, [make_record(5), make_record(6, metrics={"loss": 0.6, "seconds_wait": 0.25})])
    steps = read(run, layout.steps(3, 1)).to_pylist()
    assert [step.pop("created_at") is not None for step in steps] == [True, True]
    common = {"sync": 3, "attempt": 1, "version": 2, "version_attempt": 1}
    assert steps == [
        {"step": 5, **common, "loss": 0.5, "lr": 3e-4, "seconds_wait": None, "weights_sha256": None},
        {"step": 6, **common, "loss": 0.6, "lr": None, "seconds_wait": 0.25, "weights_sha256": "cd" * 32},
    ]


def test_a_number_that_is_not_finite_is_kept_as_it_is(run: Run):
    write(run, [make_record(5, metrics={"grad_norm": float("inf")})])
    assert read(run, layout.steps(3, 1))["grad_norm"].to_pylist() == [float("inf")]


def test_attempts_keep_ledgers_of_their_own(run: Run):
    write(run, [make_record(5)])
    write(run, [make_record(5, metrics={"loss": 9.0})], attempt=2)
    assert read(run, layout.steps(3, 1))["loss"].to_pylist() == [0.5]
    assert read(run, layout.steps(3, 2))["loss"].to_pylist() == [9.0]


def test_a_ledger_is_never_rewritten(run: Run):
    write(run, [make_record(5)])
    with pytest.raises(Superseded, match="attempt 1 too"):
        write(run, [make_record(5, draws=[make_draw(5, s, p) for s in (0, 1) for p in (0, 1)], metrics={"loss": 1.0})])
    assert read(run, layout.steps(3, 1))["loss"].to_pylist() == [0.5]


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "sync 3 closes no step"),
        ([make_record(5), make_record(7)], "must be consecutive"),
        ([make_record(5), make_record(6, sync=4)], "step 6 belongs to sync 4, not 3"),
        ([make_record(5, outcomes=make_record(5).outcomes[::-1])], "in the order of the draws"),
        ([make_record(5, draws=[make_draw(4, 0, 0)])], "in the order of the draws"),
    ],
)
def test_what_no_trainer_should_write_is_refused(run: Run, records: Sequence[StepRecord], message: str):
    with pytest.raises(ValueError, match=message):
        write(run, records)
    assert not run.store.exists(layout.draws(3, 1))
