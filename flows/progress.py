"""Progress bars for slow work. They go to standard error, so that the output of a command can be piped."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

Tell = Callable[[int, int], None]
"""Called with the number of items that are done, and the number of all items."""


@contextmanager
def bar(title: str) -> Iterator[Tell]:
    """Yield a function that updates a progress bar. The bar appears with the first call, and only in a terminal."""
    progress: Progress | None = None

    def tell(done: int, total: int) -> None:
        nonlocal progress
        progress = progress or _make(title)
        progress.start()
        progress.update(progress.task_ids[0], completed=done, total=total)

    try:
        yield tell
    finally:
        if progress:
            progress.stop()


def _make(title: str) -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(title), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    progress.add_task(title, total=None)
    return progress


def was_interrupted(error: BaseException) -> bool:
    """Return True if an error comes from a Ctrl-C. DuckDB turns a Ctrl-C during a query into an error of its own."""
    return isinstance(error, KeyboardInterrupt) or isinstance(error.__cause__, KeyboardInterrupt)
