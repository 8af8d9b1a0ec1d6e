"""Read prompts in the format in which IFEval and IFBench are published: rows with the fields `key`, `prompt`,
`instruction_id_list` (kinds of constraints) and `kwargs` (the arguments of each)."""

from collections.abc import Mapping, Sequence
from typing import Any

from tba.errors import DataError
from tba.tasks.fields import text_in
from tba.tasks.instructions import checkers
from tba.tasks.instructions.constraints import Constraint
from tba.tasks.instructions.own_prompts import Instruction

FIELDS = ("key", "prompt", "instruction_id_list", "kwargs")
Row = Mapping[str, Any]


def read(split: str, rows: Sequence[Row], *, leave_out: bool) -> dict[int, Instruction]:
    """Return the prompts by the number of their row. If `leave_out` is set, rows that cannot be checked here are left
    out. Raise DataError if a row is malformed, cannot be checked, or is of IFBench in the split `train`."""
    prompts, obstacles = dict[int, Instruction](), dict[int, str]()
    for i, row in enumerate(rows):
        text, constraints = text_in(split, i, row, "prompt"), _constraints(split, i, row)
        if split == "train" and any(constraint.kind in checkers.library().ifbench for constraint in constraints):
            raise DataError(f"train row {i}: task.train must not have prompts of IFBench, which is for evaluation only")
        if obstacle := next(filter(None, map(checkers.obstacle, constraints)), ""):
            obstacles[i] = obstacle
        else:
            prompts[i] = Instruction(text, constraints)
    if obstacles and not leave_out:
        first, obstacle = next(iter(obstacles.items()))
        raise DataError(
            f"{split} row {first}: {obstacle}. task.options.uncheckable=leave-out leaves out the {len(obstacles)} of "
            f"{len(rows)} rows that cannot be checked here"
        )
    return prompts


def _constraints(split: str, index: int, row: Row) -> tuple[Constraint, ...]:
    kinds, arguments = row.get("instruction_id_list"), row.get("kwargs")
    if not isinstance(kinds, list) or not kinds:
        raise DataError(f"{split} row {index}: field 'instruction_id_list' must be a list of kinds, got {kinds!r}")
    if not isinstance(arguments, list) or len(arguments) != len(kinds):
        raise DataError(
            f"{split} row {index}: field 'kwargs' must be a list with the arguments of each of the {len(kinds)} kinds, "
            f"got {arguments!r:.200}"
        )
    constraints = tuple(Constraint(kind, _given(given)) for kind, given in zip(kinds, arguments, strict=True))
    for constraint in constraints:
        if fault := checkers.fault(constraint):
            raise DataError(f"{split} row {index}: {fault}")
    return constraints


def _given(arguments: Any) -> dict[str, Any]:
    """Return the arguments that have a value. Parquet files have every name in every row, and store some counts as
    floats, with which checkers cannot count."""
    items = arguments.items() if isinstance(arguments, Mapping) else ()
    return {name: _whole(value) for name, value in items if value is not None}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value
