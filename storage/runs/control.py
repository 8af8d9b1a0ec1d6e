"""The wanted state of a run: whether it should go on, and with how many searchers. Changes use compare-and-swap."""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from storage import layout
from storage.objects import records
from storage.runs.run import Run
from tba.errors import ConfigError, Conflict, Damaged

_ADVICE = (
    "whoever supervises the run restores it; where nobody does, remove this object: `tba resume` then goes on with "
    "search.searchers of the settings"
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
    """Return the wanted state; None while nobody has set it. Damaged names the object if it is unreadable."""
    found = run.store.read_tagged(layout.STATE)
    return _decode(run, found[0]) if found else None


def read_state(run: Run) -> State:
    """Return the wanted state; the default state while nobody has set it."""
    return find_state(run) or State()


def keep_state(run: Run, last: State | None) -> State | None:
    """Return the wanted state, as `find_state` does. `last` is the state that was read before. Raise Damaged
    also if there was one and its record is gone."""
    found = find_state(run)
    if found is None and last is not None:
        raise Damaged(f"{run.url}/{layout.STATE} is missing, although it existed before")
    return found


def is_state_known(run: Run) -> bool:
    """True if anybody has set the wanted state."""
    return run.store.exists(layout.STATE)


def change_state(run: Run, **changes: Any) -> State:
    """Change `desired`, `searchers` or `why`, and keep what other processes change at the same time."""
    unknown = changes.keys() - {"desired", "searchers", "why"}
    if unknown:
        raise ConfigError(f"a run's state has no field {', '.join(sorted(unknown))}")
    while True:
        found = run.store.read_tagged(layout.STATE)
        before = _known(run, found[0]) if found else State()
        state = replace(before, **changes, changed_at=records.now())
        record = {**(json.loads(found[0]) if found else {}), **asdict(state)}  # also what a later version has added
        try:
            run.store.replace(layout.STATE, records.encode(record), tag=found[1] if found else None)
        except Conflict:
            continue
        return state


def _known(run: Run, data: bytes) -> State:
    """Return the state before a change. Raise Damaged, which says what to do, if it is unreadable: a change keeps
    the other fields, and their values must not be guessed."""
    try:
        return _decode(run, data)
    except Damaged as error:
        raise Damaged(f"{error}; {_ADVICE}") from None


def check_state(run: Run) -> None:
    """Raise Damaged, which says what to do, if the wanted state cannot be read."""
    if found := run.store.read_tagged(layout.STATE):
        _known(run, found[0])


def restore_state(run: Run, last: State) -> State:
    """Write `last` as the wanted state if the stored state is damaged or gone. Return the state that is stored then."""
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
