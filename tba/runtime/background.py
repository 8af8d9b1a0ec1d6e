"""Jobs done one after the other in a thread of their own, beside whoever hands them over."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """A job that fails stops all that come after it, and `check` raises its error. At most one job waits behind the
    one that is being done, so what jobs hold in memory is bounded: `make_room` waits until there is room for another.

    Belongs to the thread that made it; only `idle` may be asked by others.
    """

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(1, name)
        self._jobs: tuple[Future[None], ...] = ()  # not known to have ended well, oldest first

    def idle(self) -> bool:
        return all(job.done() for job in self._jobs)

    def check(self) -> None:
        """Raise the error of the first job that failed."""
        while self._jobs and self._jobs[0].done():
            self._jobs[0].result()
            self._jobs = self._jobs[1:]

    def make_room(self) -> None:
        self.check()
        while len(self._jobs) > 1:
            self._jobs[0].result()
            self.check()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """The job begins when all before it have ended well."""
        self.make_room()
        before = self._jobs[-1] if self._jobs else None

        def after_the_one_before() -> None:
            if before is not None:
                before.result()
            job()

        self._jobs += (submitted := self._pool.submit(after_the_one_before),)
        return submitted

    def finish(self) -> None:
        """Wait for every job; raise the first error."""
        for job in self._jobs:
            job.result()

    def cancel(self) -> None:
        """Drop what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Wait until every job that has not been dropped has ended, well or not; only `finish` tells which."""
        self._pool.shutdown()
