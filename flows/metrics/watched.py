"""Which runs are read for a scrape, and until when.

A scrape reads all runs that are alive, side by side, and answers when its deadline is over at the latest. A
reading that is not done by then goes on, and the next scrape uses it. A run that has finished is not read again. Of the
other runs without living roles, each scrape looks at a few in turn, to see whether one of them was resumed. A run that
was never looked at comes at once.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from flows.metrics.catalogue import METRICS, Metric, Values
from flows.metrics.run_reader import RunReader
from storage import layout
from storage.objects.open_store import open_store
from storage.runs.run import Run, run_urls
from tba.errors import Missing, TBAError

log = logging.getLogger(__name__)

T = TypeVar("T")
Sample = tuple[Metric, Mapping[str, str], float]

DORMANT_AT_ONCE = 16  # dormant runs that a scrape looks at
READ_AT_ONCE = 16  # runs that are read side by side
FRESH = 60.0  # seconds for which a reading may be shown if the next one is not done


class Job(Generic[T]):
    """Does the same work again and again, in a thread of its own. So who waits for the result waits no longer than
    wanted, and work that hangs does not delay the end of the process."""

    def __init__(self, work: Callable[[], T], slots: threading.Semaphore):
        self._work, self._slots = work, slots
        self._thread: threading.Thread | None = None
        self._done: tuple[T, float] | None = None  # the newest result and its time; None after a failure
        self._told = ""

    def start(self) -> None:
        """Start the work, unless it is still going on."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def result(self, until: float, *, fresh: float = FRESH) -> T | None:
        """Wait for the work until a time of `time.monotonic`. Return its newest result; None if the result is older
        than `fresh` seconds, or if the work has failed."""
        if self._thread:
            self._thread.join(max(0.0, until - time.monotonic()))
        done = self._done
        return done[0] if done and time.monotonic() - done[1] < fresh else None

    def _run(self) -> None:
        with self._slots:
            try:
                self._done = self._work(), time.monotonic()
                self._told = ""
            except Exception as error:  # whatever it is, other runs must be shown
                self._done = None
                if self._told != str(error):  # once, not at every scrape
                    log.warning("%s", error, exc_info=not isinstance(error, TBAError))
                self._told = str(error)


class WatchedRun:
    """A run and its newest values. A run that is named on the command line is shown however old it is."""

    def __init__(self, run: Run, slots: threading.Semaphore, *, is_named: bool):
        self.run, self.reader, self.is_named = run, RunReader(run), is_named
        self.job = Job(self._read, slots)
        self._values = Values()

    @property
    def is_shown(self) -> bool:
        return self.is_named or not self.reader.is_old

    def samples(self, until: float) -> Iterator[Sample]:
        """Yield the samples of the run. A dormant run keeps its values until it is read again."""
        values = self.job.result(until, fresh=math.inf if self.reader.is_dormant else FRESH)
        if not self.is_shown:
            return
        labels = {"root": self.run.root, "run": self.run.name}
        yield METRICS["tba_run_up"], labels, float(values is not None)
        for metric, own, value in values or ():
            yield metric, {**labels, **dict(zip(metric.labels, own, strict=True))}, value

    def _read(self) -> Values:
        if self.reader.look() and self.is_shown:
            self._values = self.reader.read()
        return self._values


class Found(NamedTuple):
    """The result of a look at a place."""

    is_run: bool  # whether the place is a run itself
    runs: Mapping[str, WatchedRun]  # by URL
    closed: Sequence[str]  # URLs of runs that cannot be opened now


class WatchedPlace:
    """A folder or prefix with runs, or a single run. Which of the two it is can only be known once it can be read."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.job = Job(self._look, threading.Semaphore(1))  # it never waits for the readings of runs
        self._slots = threading.Semaphore(READ_AT_ONCE)
        self._is_run = False  # True once it is known to be one
        self._runs: dict[str, WatchedRun] = {}
        self._told: dict[str, str] = {}  # by URL, the newest error of a run that could not be opened

    def _look(self) -> Found:
        """Open the runs that are new, try those again that could not be opened, and forget those that are gone."""
        self._is_run = self._is_run or open_store(self.url).exists(layout.RUN)
        urls = [self.url] if self._is_run else run_urls(self.url)
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            new = [url for url in urls if url not in self._runs]
            opened = dict(zip(new, pool.map(self._open, new), strict=True))
        known = {**self._runs, **{url: run for url, run in opened.items() if run}}
        self._runs = {url: known[url] for url in urls if url in known}
        self._told = {url: self._told[url] for url in urls if url in self._told}
        return Found(self._is_run, self._runs, list(self._told))

    def _open(self, url: str) -> WatchedRun | None:
        """Return the run at a URL; None if it cannot be opened now, or if nobody has created it yet."""
        try:
            run = WatchedRun(Run.open(url), self._slots, is_named=self._is_run)
        except TBAError as error:
            told = self._told.pop(url, "")
            if not (isinstance(error, Missing) and self._is_absent(url)):
                self._told[url] = str(error)
                if told != str(error):  # once, not at every scrape
                    log.warning("%s is left out: %s", url, error)
            return None
        self._told.pop(url, None)
        return run

    def _is_absent(self, url: str) -> bool:
        """True if a folder of the root has no run."""
        with suppress(TBAError):
            return not self._is_run and not open_store(url).exists(layout.RUN)
        return False


class Watched:
    """All roots and runs that one `tba metrics` exports, by their URLs."""

    def __init__(self, urls: Sequence[str]):
        self._places = [WatchedPlace(url) for url in urls]
        self._turn = 0
        self._scraping = threading.Lock()

    def scrape(self, *, deadline: float) -> list[Sample]:
        """Return the samples of all metrics. This takes hardly more than `deadline` seconds."""
        until = time.monotonic() + deadline
        with self._scraping:
            return list(self._scrape(until))

    def _scrape(self, until: float) -> Iterator[Sample]:
        runs: dict[str, WatchedRun] = {}
        closed: dict[str, Mapping[str, str]] = {}  # by URL, the labels of a run that could not be opened
        for place in self._places:
            place.job.start()
        for place in self._places:
            found, labels = place.job.result(until), {"root": place.url}
            if found is None:
                yield METRICS["tba_up"], labels, 0.0
                continue
            if not found.is_run:
                number = len(found.runs) + len(found.closed)
                yield METRICS["tba_up"], labels, float(number > 0)
                yield METRICS["tba_root_runs"], labels, float(number)
            for url in found.closed:
                closed.setdefault(url, {"root": layout.root_of(url), "run": url.rpartition("/")[2]})
            runs.update(found.runs)
        for url in closed.keys() - runs.keys():
            yield METRICS["tba_run_up"], closed[url], 0.0
        for run in self._due(list(runs.values())):
            run.job.start()
        for run in runs.values():
            yield from run.samples(until)

    def _due(self, runs: Sequence[WatchedRun]) -> Iterator[WatchedRun]:
        """Yield the runs that this scrape reads: those that are alive, and some of the dormant ones in turn."""
        dormant: list[WatchedRun] = []
        for run in runs:
            if run.reader.is_dormant and not run.reader.has_finished:
                dormant.append(run)
            elif not run.reader.has_finished:
                yield run
        start = self._turn % max(1, len(dormant))
        self._turn = start + DORMANT_AT_ONCE
        yield from islice([*dormant[start:], *dormant[:start]], DORMANT_AT_ONCE)
