"""Report on standard error what is damaged or missing in a run."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import duckdb

from flows.escaping import plain
from flows.queries.query_process import QueryProcess
from flows.queries.row_values import decode_row
from flows.queries.statements import explain
from storage.objects.damage import Damage
from storage.queries.views import connect
from storage.runs.run import Run
from tba.errors import ConfigError, Damaged, TBAError

_NAMED = 3  # how many objects the line names; `tba check` names all
_MOST_CHARACTERS = 200  # how many characters of each problem the line shows


def damage_of(con: duckdb.DuckDBPyConnection) -> list[Damage]:
    """Return the damaged and missing objects that the views of a run leave out."""
    return [Damage(key, problem) for key, problem in con.execute("select key, problem from damage").fetchall()]


def damage_by(queries: QueryProcess) -> list[Damage]:
    """Return the damaged and missing objects that the views of a query process leave out."""
    _, rows = queries.ask("rows", query="select key, problem from damage", parameters=())
    return [Damage(*decode_row(row)) for row in rows]


def warn(run: Run, con: duckdb.DuckDBPyConnection) -> list[Damage]:
    """Print a warning if the views leave out damaged or missing objects. Return these objects."""
    damage = damage_of(con)
    warn_of(run, damage)
    return damage


def warn_of(run: Run, damage: Sequence[Damage]) -> None:
    """Print a warning on standard error if there is damage. Standard output has only the output of the command."""
    if damage:
        print(f"warning: {in_words(run, damage)}", file=sys.stderr)


def is_inside_an_object(error: Exception) -> bool:
    """Return True if a query failed because the content of an object is damaged. The views leave out most damaged
    objects, but compare some files with their records by size only. A query finds damage that keeps the size."""
    message = str(error)
    return "arrow_scan" in message and "Failed to open local file" not in message


def culprits(run: Run, error: Exception) -> str:
    """If an error comes from an object that is damaged inside, read the whole run and return words that name damaged
    objects. After that, new connections leave all damaged objects out. Return an empty string for any other error."""
    if not is_inside_an_object(error):
        return ""
    with connect(run, thorough=True) as con:
        damage = damage_of(con)
    return f"; {in_words(run, damage)}: repeat the query" if damage else ""


def refusal(run: Run, error: Exception) -> TBAError:
    """Return the error for a query that failed: ConfigError if the query is wrong, Damaged if an object is damaged
    inside."""
    at_fault = culprits(run, error)
    return Damaged(explain(error) + at_fault) if at_fault else ConfigError(explain(error))


def in_words(run: Run, damage: Sequence[Damage]) -> str:
    """Describe the damage in one line that names a few of the objects."""
    named = [f"{it.key} ({it.problem[:_MOST_CHARACTERS]})" for it in damage[:_NAMED]]
    listed = "; ".join([*named, *(["…"] if len(damage) > _NAMED else [])])
    one = "1 object of the run {} is damaged or missing and is left out"
    more = f"{len(damage):,} objects of the run {{}} are damaged or missing and are left out"
    left_out = (one if len(damage) == 1 else more).format(run.name)
    return plain(f"{left_out}: {listed} — tba check {run.url} names them all")


@contextmanager
def naming_errors(run: Run) -> Iterator[None]:
    """Turn an error of DuckDB into ConfigError with one line, or into Damaged if an object of the run is damaged
    inside. The line then names damaged objects."""
    try:
        yield
    except duckdb.Error as error:
        raise refusal(run, error) from error
