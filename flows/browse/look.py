"""A run as it was when it was last looked at: one connection, which answers one query after another."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import duckdb

from flows.damage import warn
from flows.page import Table
from flows.progress import bar
from flows.runs import Summary, summarise
from storage.run import Run
from storage.views import connect

_INTERRUPT_EVERY = 0.05  # seconds: what comes between two parts of a query is lost


class Refused(Exception):
    """What somebody asked for cannot be answered; the message says why."""


class TooLong(Refused):
    """It took longer than a query may."""


class Look:
    """Each query has `seconds`, and so has the wait for those before it: nothing here goes on for ever."""

    def __init__(self, run: Run, seconds: float):
        self.run = run
        self.seconds = seconds
        self._one_at_a_time = threading.Lock()
        with bar("copying what is new") as tell:
            self._con = connect(run, progress=tell)
        warn(run, self._con)
        self._note()

    def _note(self) -> None:
        self.at = datetime.now(UTC)
        self.summary: Summary = summarise(self.run)

    def refresh(self) -> None:
        """Look again. What was seen before stays if that fails."""
        with self._turn():
            before, self._con = self._con, connect(self.run)
            before.close()
            self._note()

    def close(self) -> None:
        self._con.interrupt()

    def ask(self, query: str, parameters: Sequence[Any] = ()) -> Table:
        """The answer to a query of ours."""
        with self._turn(), _within(self._con, self.seconds):
            return _table(self._con.execute(query, list(parameters)))

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        table = self.ask(query, parameters)
        return [dict(zip(table.columns, row, strict=True)) for row in table.rows]

    def answer(self, query: str, *, most: int, skip: int = 0) -> Table:
        """Rows of a query that a person wrote: of one that reads, so that no page changes what another one shows."""
        with self._turn(), _within(self._con, self.seconds):
            statements = self._con.extract_statements(query.replace("\0", ""))
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                pivots = "; a pivot names its values: pivot ... on ... in (...)" if "pivot" in query.lower() else ""
                raise Refused(f"one query that reads: it begins with select, from or with{pivots}")
            found = self._con.sql(statements[0]).limit(most, skip)
            return Table(found.columns, found.fetchall())

    @contextmanager
    def _turn(self) -> Iterator[None]:
        if not self._one_at_a_time.acquire(timeout=self.seconds):
            raise TooLong(f"other queries have been going on for {self.seconds:g} seconds; ask again in a moment")
        try:
            yield
        finally:
            self._one_at_a_time.release()


@contextmanager
def _within(con: duckdb.DuckDBPyConnection, seconds: float) -> Iterator[None]:
    over = threading.Event()

    def stop() -> None:
        if not over.wait(seconds):
            con.interrupt()
            while not over.wait(_INTERRUPT_EVERY):
                con.interrupt()

    watch = threading.Thread(target=stop, daemon=True)
    watch.start()
    try:
        yield
    except duckdb.InterruptException:
        raise TooLong(
            f"it took longer than {seconds:g} seconds (--seconds); ask for less, such as some steps"
        ) from None
    finally:
        over.set()
        watch.join()


def _table(found: duckdb.DuckDBPyConnection) -> Table:
    return Table([column[0] for column in found.description or ()], found.fetchall())
