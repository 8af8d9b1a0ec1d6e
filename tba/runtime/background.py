"""Run jobs one after the other in a background thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """A thread that runs submitted jobs in order. If a job fails, no later job runs, and `check` raises the error. At
    most one job waits while another runs, which bounds the memory that jobs hold; `make_room` waits until another job
    may be submitted.

    Only the thread that made this object may use it; other threads may only call `idle`.
    """

    def __init__(self, name: str):
        self._pool = ThreadPoolExecutor(1, name)
        self._jobs: tuple[Future[None], ...] = ()  # jobs that may fail or have failed, oldest first

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
        """Wait for room, and add a job. The job begins once all jobs before it have succeeded."""
        self.make_room()
        before = self._jobs[-1] if self._jobs else None

        def after_the_one_before() -> None:
            if before is not None:
                before.result()
            job()

        self._jobs += (submitted := self._pool.submit(after_the_one_before),)
        return submitted

    def finish(self) -> None:
        """Wait for every job. Raise the first error."""
        for job in self._jobs:
            job.result()

    def cancel(self) -> None:
        """Drop the jobs that have not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def close(self) -> None:
        """Wait until every job has ended or was dropped. Unlike `finish`, this raises no error of a job."""
        self._pool.shutdown()
