"""Tells people on standard error what is damaged or missing in a run."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flows.texts import plain
from storage.damage import Damage
from storage.run import Run

if TYPE_CHECKING:
    import duckdb

_NAMED = 3  # objects in a line; `tba check` names them all
_MOST_CHARACTERS = 200  # of one problem in a line


def damage_of(con: "duckdb.DuckDBPyConnection") -> list[Damage]:
    """What the views of a run leave out."""
    return [Damage(key, problem) for key, problem in con.execute("select key, problem from damage").fetchall()]


def warn(run: Run, con: "duckdb.DuckDBPyConnection") -> list[Damage]:
    """Say what the views leave out in one line on standard error, so that what a command prints can be piped on.
    Returns the damage."""
    damage = damage_of(con)
    if damage:
        print(f"warning: {in_words(run, damage)}", file=sys.stderr)
    return damage


def in_words(run: Run, damage: Sequence[Damage]) -> str:
    """One line, with a few of the objects."""
    named = [f"{it.key} ({it.problem[:_MOST_CHARACTERS]})" for it in damage[:_NAMED]]
    told = "; ".join([*named, *(["…"] if len(damage) > _NAMED else [])])
    one = "1 object of the run {} is damaged or missing and is left out"
    more = f"{len(damage):,} objects of the run {{}} are damaged or missing and are left out"
    left_out = (one if len(damage) == 1 else more).format(run.name)
    return plain(f"{left_out}: {told} — tba check {run.url} names them all")
