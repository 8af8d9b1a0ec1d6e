"""A snapshot of a run, which all pages show until the run is read again. One process answers queries, one at a time."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from flows.pages.tables import Table
from flows.planning.run_summary import Summary, summarise
from flows.progress import bar
from flows.queries.damage_report import damage_by, warn_of
from flows.queries.query_process import QueryProcess
from flows.queries.row_values import decode_row, encode_row
from storage.runs.run import Run
from tba.errors import Refused, TooLong

__all__ = ["Refused", "RunSnapshot", "TooLong"]


class RunSnapshot:
    """The state of a run that all pages show. A query may take `seconds`, and may wait as long for earlier queries. If
    a query takes longer and cannot be interrupted, its process is killed, and the next query reads the run again."""

    def __init__(self, run: Run, seconds: float):
        self.run = run
        self.seconds = seconds
        self._one_at_a_time = threading.Lock()
        self._queries = QueryProcess(run.url, on_start=self._note)
        with bar("copying what is new") as tell:
            self._queries.start(tell)
        warn_of(run, damage_by(self._queries))

    def _note(self) -> None:
        self.at = datetime.now(UTC)
        self.summary: Summary = summarise(self.run)

    def refresh(self) -> None:
        """Read the run again. If reading fails, raise the error; pages continue to show the earlier state."""
        with self.turn():
            self._queries.refresh()

    def close(self) -> None:
        self._queries.close()

    def ask(self, query: str, parameters: Sequence[Any] = ()) -> Table:
        """Return the answer to a query that a page makes."""
        return self._ask("rows", query=query, parameters=encode_row(parameters))

    def rows(self, query: str, parameters: Sequence[Any] = ()) -> list[dict[str, Any]]:
        return self.ask(query, parameters).records()

    def answer(self, query: str, *, most: int, skip: int = 0) -> Table:
        """Return the rows of a query that a person wrote. The query may only read, and runs in a database of its own,
        so that nothing that it changes there affects another query. Long texts are cut."""
        return self._ask("answer", query=query, most=most, skip=skip)

    def _ask(self, what: str, **arguments: Any) -> Table:
        with self.turn():
            columns, rows = self._queries.ask(what, seconds=self.seconds, **arguments)
        return Table(columns, list(map(decode_row, rows)))

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other query runs, then hold back other queries during the `with` block. Raise TooLong if the
        wait takes `seconds`."""
        if not self._one_at_a_time.acquire(timeout=self.seconds):
            raise TooLong(f"other queries have been running for {self.seconds:g} seconds; try again in a moment")
        try:
            yield
        finally:
            self._one_at_a_time.release()
