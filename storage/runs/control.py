"""The wanted state of a run: whether the run should continue or stop, and with how many searchers. Changes use
compare-and-swap."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from storage import layout
from storage.objects import records
from storage.runs.run import Run
from tba.errors import ConfigError, Conflict, Damaged

_ADVICE = (
    "the run's supervisor restores it; if the run has no supervisor, remove this object: `tba resume` then takes the "
    "number of searchers from the setting search.searchers"
)


@dataclass(frozen=True, kw_only=True)
class State:
    desired: Literal["run", "stop"] = "run"
    searchers: int = 1
    why: str = ""
    changed_at: str = ""

    def __post_init__(self) -> None:
        if self.desired not in ("run", "stop"):
            raise ConfigError(f"desired must be 'run' or 'stop', got {self.desired!r}")
        for name, text in (("why", self.why), ("changed_at", self.changed_at)):
            if not isinstance(text, str):
                raise ConfigError(f"{name} must be a text, got {text!r}")
        if isinstance(self.searchers, bool) or not isinstance(self.searchers, int) or self.searchers < 0:
            raise ConfigError(f"searchers must be a whole number from 0, got {self.searchers!r}")


def find_state(run: Run) -> State | None:
    """Return the wanted state; None if nobody has set it yet. Raise Damaged, naming the object, if the state cannot be
    read."""
    found = run.store.read_tagged(layout.STATE)
    return _decode(run, found[0]) if found else None


def read_state(run: Run) -> State:
    """Return the wanted state; the default state if nobody has set it yet."""
    return find_state(run) or State()


def keep_state(run: Run, last: State | None) -> State | None:
    """Return the wanted state; None if nobody has set it yet. `last` is the state that the caller read before. Raise
    Damaged if the state cannot be read, or if it is gone although `last` is not None."""
    found = find_state(run)
    if found is None and last is not None:
        raise Damaged(f"{run.url}/{layout.STATE} is missing, although it existed before")
    return found


def is_state_known(run: Run) -> bool:
    """True if anybody has set the wanted state."""
    return run.store.exists(layout.STATE)


def change_state(run: Run, **changes: Any) -> State:
    """Change `desired`, `searchers` or `why`, and return the new state. Changes that other processes make at the same
    time are kept. Raise Damaged if the stored state cannot be read."""
    unknown = changes.keys() - {"desired", "searchers", "why"}
    if unknown:
        raise ConfigError(f"a run's state has no field {', '.join(sorted(unknown))}")
    while True:
        found = run.store.read_tagged(layout.STATE)
        before = _known(run, found[0]) if found else State()
        state = replace(before, **changes, changed_at=records.now())
        record = {
            **(json.loads(found[0]) if found else {}),
            **asdict(state),
        }  # keeps fields that a later version has added
        try:
            run.store.replace(layout.STATE, records.encode(record), tag=found[1] if found else None)
        except Conflict:
            continue
        return state


def _known(run: Run, data: bytes) -> State:
    """Return the state in `data`. If it cannot be read, raise Damaged and say what to do. A change must not begin from
    an unreadable state, because it keeps the fields that it does not set."""
    try:
        return _decode(run, data)
    except Damaged as error:
        raise Damaged(f"{error}; {_ADVICE}") from None


def check_state(run: Run) -> None:
    """Raise Damaged, and say what to do, if the wanted state is stored but cannot be read."""
    if found := run.store.read_tagged(layout.STATE):
        _known(run, found[0])


def restore_state(run: Run, last: State) -> State:
    """Write `last` as the wanted state if the stored state is damaged or gone. Return the state that is stored
    afterwards."""
    while True:
        found = run.store.read_tagged(layout.STATE)
        with suppress(Damaged):
            if found:
                return _decode(run, found[0])
        try:
            run.store.replace(layout.STATE, records.encode(asdict(last)), tag=found[1] if found else None)
        except Conflict:
            continue
        return last


def _decode(run: Run, data: bytes) -> State:
    name = f"{run.url}/{layout.STATE}"
    record = records.decode(data, name, "desired", "searchers", "why", "changed_at")
    try:
        return State(**{name: record[name] for name in ("desired", "searchers", "why", "changed_at")})
    except ConfigError as error:
        raise Damaged(f"{name}: {error}") from None
