"""The process that answers queries over a run: `python -m flows.queries.query_worker`, which query_process.py starts.

Orders arrive on standard input and answers leave on standard output. One query runs at a time. A second thread receives
interrupts. A query that does not react to an interrupt is ended from outside, by killing this process. The process ends
when the process that started it ends. Its memory is limited to a part of the machine's.
"""

import argparse
import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, ClassVar

import duckdb

from flows.queries import answer_forms
from flows.queries.row_values import Bounds, Encoder, decode_row
from flows.queries.statements import check_names, last, with_texts_cut
from storage.queries.views import Stored, read_stored
from storage.runs.run import Run
from tba.errors import ConfigError, QueryFailed, Refused, TBAError
from tba.runtime.child import end_with_parent
from tba.runtime.messages import receive, send, take_pipes

OF_PAGES = Bounds(text=1_000_000, items=1_000_000, whole=128_000_000)
"""Bounds for queries of the pages themselves, which show long texts and all tokens."""
OF_READERS = Bounds(text=10_000, items=1_000, whole=8_000_000)
"""Bounds for queries that a reader types, of which a page shows only the first line of each value."""

_AT_A_TIME = 64  # rows that are converted to Python objects at a time
_PIECE = 1 << 18  # maximum characters of a message
_INTERRUPT_EVERY = 0.05  # seconds between interrupts; an interrupt between two parts of a query is lost
_LIMIT_FACTOR = 1.5  # times DuckDB's own memory limit, because DuckDB does not count everything

Say = Callable[[dict[str, Any]], None]


class _Interrupted(Exception): ...


class Worker:
    """Carries out orders on one run. A table that a query of `write` creates can be used by later queries of `write`,
    but not by queries of `answer`."""

    def __init__(self, url: str, say: Say):
        self._url = url
        self._say = say
        self._stored: Stored | None = None
        self._kept: duckdb.DuckDBPyConnection | None = None  # for pages, and for the queries of one person at a prompt
        self._spare: duckdb.DuckDBPyConnection | None = None  # prepared for the next `answer`
        self._at_work: duckdb.DuckDBPyConnection | None = None  # the connection on which a query is running
        self._number = 0  # number of the current order, or of the last one
        self._over = 0  # number of the last order that has ended
        self._interrupted = 0  # number of the last order that was interrupted

    def interrupt(self, number: int) -> None:
        """Interrupt the order of this number, repeatedly until it has ended. The order may not have begun yet."""
        self._interrupted = number
        while self._over < number:
            if con := self._at_work:
                with suppress(duckdb.Error):  # the connection may have been closed meanwhile
                    con.interrupt()
            time.sleep(_INTERRUPT_EVERY)

    def obey(self, order: Mapping[str, Any]) -> None:
        self._number = order["n"]
        try:
            self._check_interrupt()
            answer = {"is": self._ORDERS[order["do"]](self, **order["with"])}
        except (_Interrupted, duckdb.InterruptException):
            answer = {"error": "Interrupted", "says": ""}
        except (duckdb.Error, MemoryError) as error:
            message = str(error) or "Out of Memory Error: the answer needs more memory than a query may use"
            answer = {"error": QueryFailed.__name__, "says": message}
        except TBAError as error:
            answer = {"error": type(error).__name__, "says": str(error)}
        except Exception as error:
            if self._interrupted != self._number:
                traceback.print_exc()
            answer = {"error": type(error).__name__, "says": str(error)}
        self._at_work, self._over = None, self._number
        self._say(answer)

    def prepare(self) -> None:
        """Create the database for the next `answer` while nobody is waiting."""
        if self._stored and not self._spare:
            self._spare = self._stored.connect()

    # --- orders -------------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Read the run, unless this has been done already."""
        if self._kept is None:
            self.refresh()

    def refresh(self) -> None:
        """Read the run again. If reading fails, raise the error; what was read before stays in use."""
        stored = read_stored(Run.open(self._url), progress=self._progress)
        before, self._stored, self._kept = (self._kept, self._spare), stored, stored.connect()
        self._spare = None
        for con in filter(None, before):
            con.close()
        _limit_memory(self._kept)

    def rows(self, query: str, parameters: Sequence[Any]) -> Any:
        """Return the column names and the rows of a query that a page or a command makes."""
        result = self._connection().execute(query, decode_row(parameters))
        return [[column[0] for column in result.description or ()], self._fetch(result, OF_PAGES)]

    def answer(self, query: str, most: int, skip: int) -> Any:
        """Return the column names and the rows of a reader's query. The query gets a database of its own, so nothing
        that it changes there, such as a setting, affects later queries."""
        self.open()
        assert self._stored
        self._at_work, self._spare = self._spare or self._stored.connect(), None
        with self._at_work as con:
            self._say({"begun": True})
            statements = con.extract_statements(query.replace("\0", ""))
            if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
                pivots = "; a pivot names its values: pivot ... on ... in (...)" if "pivot" in query.lower() else ""
                raise Refused(f"only one query that reads is possible: it begins with select, from or with{pivots}")
            result = con.sql(statements[0]).limit(most, skip)
            cut = with_texts_cut(result, OF_READERS.text)
            return [result.columns, self._fetch(cut, OF_READERS)]

    def write(self, query: str, form: str, width: int, path: str | None, must_have_rows: bool) -> int | None:
        """Send the rows of the last statement as text, or write them to a Parquet file and return their number."""
        result = last(self._connection(), query)
        if result is None:
            if must_have_rows:
                raise ConfigError("the last statement has no rows to show")
            return None
        if form in ("json", "parquet"):
            check_names(f"--{form}", result.columns)
        if form == "parquet":
            assert path
            return _write_parquet(result, Path(path), self._check_interrupt)
        forms = {"csv": answer_forms.csv, "json": answer_forms.json_rows}
        self._tell(forms[form](result) if form in forms else answer_forms.table(result, width))
        return None

    _ORDERS: ClassVar = {"open": open, "refresh": refresh, "rows": rows, "answer": answer, "write": write}

    # --- helpers of orders --------------------------------------------------------------------------------------------

    def _connection(self) -> duckdb.DuckDBPyConnection:
        self.open()
        assert self._kept
        self._at_work = self._kept
        self._say({"begun": True})
        return self._kept

    def _fetch(self, result: "duckdb.DuckDBPyConnection | duckdb.DuckDBPyRelation", bounds: Bounds) -> list[list[Any]]:
        encoder, rows = Encoder(bounds), list[list[Any]]()
        while some := result.fetchmany(_AT_A_TIME):
            self._check_interrupt()
            rows += map(encoder.row, some)
        return rows

    def _tell(self, pieces: Iterator[str]) -> None:
        for piece in pieces:
            for start in range(0, len(piece), _PIECE):
                self._check_interrupt()
                self._say({"text": piece[start : start + _PIECE]})

    def _progress(self, done: int, total: int) -> None:
        self._say({"progress": [done, total]})

    def _check_interrupt(self) -> None:
        if self._interrupted == self._number:
            raise _Interrupted


def _write_parquet(rows: duckdb.DuckDBPyRelation, path: Path, each: Callable[[], None]) -> int:
    try:
        return answer_forms.parquet(rows, path, each=each)
    except OSError as error:
        raise ConfigError(f"--parquet: {path.parent}: {error.strerror}") from None


def _limit_memory(con: duckdb.DuckDBPyConnection) -> None:
    """Limit the memory of this process, so that a query that needs too much fails and the machine does not. DuckDB's
    own limit counts neither lists nor the rows that it returns."""
    import resource

    [(limit,)] = con.execute("select current_setting('memory_limit')").fetchall()
    size, unit = limit.split()
    most = int(float(size) * {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}[unit] * _LIMIT_FACTOR)
    with suppress(OSError, ValueError):  # there is a lower limit already, or this process may not set one
        resource.setrlimit(resource.RLIMIT_DATA, (_held() + most, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    with suppress(OSError):  # if the machine runs out of memory all the same, Linux kills this process first
        Path("/proc/self/oom_score_adj").write_text("800")


def _held() -> int:
    """Return the bytes that already count against the memory limit. Libraries reserve more memory than they use."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmData:"):
                return int(line.split()[1]) * 1024
    return 2**31


def serve(worker: Worker, orders: BinaryIO) -> None:
    """Carry out orders until standard input ends. Then end the process at once, even in the middle of a query."""
    waiting: SimpleQueue[Mapping[str, Any]] = SimpleQueue()

    def listen() -> None:
        while (order := receive(orders)) is not None:
            if order[0]["do"] == "interrupt":
                worker.interrupt(order[0]["n"])
            else:
                waiting.put(order[0])
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        order = waiting.get()
        worker.obey(order)
        if order["do"] == "answer":
            worker.prepare()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flows.queries.query_worker", description="Answers queries over a run."
    )
    parser.add_argument("--run", required=True)
    options = parser.parse_args(arguments)
    end_with_parent()
    orders, answers = take_pipes()

    def say(message: dict[str, Any]) -> None:
        try:
            send(answers, message)
        except BrokenPipeError:
            os._exit(0)

    serve(Worker(options.run, say), orders)


if __name__ == "__main__":
    main()
