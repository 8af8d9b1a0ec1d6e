"""Which runs are read for a scrape, and until when.

A scrape reads all runs that are alive, side by side, and answers when its deadline is over at the latest. A
reading that is not done by then goes on, and the next scrape uses it. A run that has finished is not read again. Of the
other runs without living roles, each scrape looks at a few in turn, to see whether one of them was resumed.
"""

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Generic, TypeVar

from flows.metrics.catalogue import METRICS, Metric, Values
from flows.metrics.run_reader import RunReader
from storage import layout
from storage.objects.open_store import open_store
from storage.runs.run import Run, run_urls
from tba.errors import TBAError

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
        has_news, reader = self.reader.look(), self.reader
        if has_news or (self.is_shown and not reader.was_read):
            self._values = reader.read()
        return self._values


class WatchedPlace:
    """A folder or prefix with runs, or a single run. Which of the two it is can only be known once it can be read."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self.is_run: bool | None = None  # None as long as it is unknown
        self._slots = threading.Semaphore(READ_AT_ONCE)
        self.job = Job(self._look, self._slots)
        self._runs: dict[str, WatchedRun | None] = {}  # by URL; None for a run that cannot be read

    def _look(self) -> dict[str, WatchedRun]:
        """Open the runs that are new, and forget those that are gone."""
        if self.is_run is None:
            self.is_run = open_store(self.url).exists(layout.RUN)
        urls = [self.url] if self.is_run else run_urls(self.url)
        with ThreadPoolExecutor(READ_AT_ONCE) as pool:
            new = [url for url in urls if url not in self._runs]
            opened = {**self._runs, **dict(zip(new, pool.map(self._open, new), strict=True))}
        self._runs = {url: opened[url] for url in urls}
        return {url: run for url, run in self._runs.items() if run}

    def _open(self, url: str) -> WatchedRun | None:
        try:
            return WatchedRun(Run.open(url), self._slots, is_named=bool(self.is_run))
        except TBAError as error:
            log.warning("%s is left out: %s", url, error)
            return None


class Watched:
    """What is watched: `places` are URLs of roots and runs, and `runs` are runs that are open already."""

    def __init__(self, places: Sequence[str], runs: Sequence[Run] = ()):
        slots = threading.Semaphore(READ_AT_ONCE)
        self._places = [WatchedPlace(url) for url in places]
        self._named = {run.url: WatchedRun(run, slots, is_named=True) for run in runs}
        self._turn = 0
        self._scraping = threading.Lock()

    def scrape(self, *, deadline: float) -> list[Sample]:
        """Return the samples of all metrics. This takes hardly more than `deadline` seconds."""
        until = time.monotonic() + deadline
        with self._scraping:
            return list(self._scrape(until))

    def _scrape(self, until: float) -> Iterator[Sample]:
        runs: dict[str, WatchedRun] = {}
        for place in self._places:
            place.job.start()
        for place in self._places:
            found, labels = place.job.result(until), {"root": place.url}
            if found is None or not place.is_run:
                yield METRICS["tba_up"], labels, float(found is not None)
            if found is not None and not place.is_run:
                yield METRICS["tba_root_runs"], labels, float(len(found))
            runs.update(found or {})
        runs.update(self._named)
        for run in self._due(list(runs.values())):
            run.job.start()
        for run in runs.values():
            yield from run.samples(until)

    def _due(self, runs: Sequence[WatchedRun]) -> Iterator[WatchedRun]:
        """Yield the runs that this scrape reads: those that are alive, and some of the dormant ones in turn."""
        unfinished = [run for run in runs if not run.reader.has_finished]
        dormant = [run for run in unfinished if run.reader.is_dormant]
        yield from (run for run in unfinished if run not in dormant)
        start = self._turn % max(1, len(dormant))
        self._turn = start + DORMANT_AT_ONCE
        yield from islice([*dormant[start:], *dormant[:start]], DORMANT_AT_ONCE)
