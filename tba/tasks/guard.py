"""Report errors in a task's code, which may be a user's own: name the task, the method, the prompt and the line."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tba.errors import DataError, TBAError
from tba.types import Prompt


@contextmanager
def asking(task: Any, method: str, prompt: Prompt | None = None) -> Iterator[None]:
    """Wrap a call of a task's method. An error of the task's code becomes a DataError, because a restart would raise it
    again. A TBAError passes through unchanged, and so does an error of the machine or the network, which a restart may
    avoid."""
    try:
        yield
    except TBAError:
        raise
    except Exception as error:
        if _may_pass(error):
            raise
        of = f" of prompt {prompt.prompt_id!r}" if prompt else ""
        raise DataError(f"task {task.name!r}: {method}{of} raised {describe(error, type(task))}") from error


def describe(error: Exception, of: Any) -> str:
    """Describe an error, with the newest file and line of its traceback in the modules of a class and its bases."""
    modules = {base.__module__ for base in getattr(of, "__mro__", (of,))}
    within = [
        f" ({frame.f_code.co_filename}, line {line})"
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_globals.get("__name__") in modules
    ]
    return f"{type(error).__name__}: {error}{within[-1] if within else ''}"


def _may_pass(error: BaseException | None) -> bool:
    """True if an error comes from the machine or the network, so that another try may succeed: for example, a service
    does not answer, or a disk or a GPU is full. Such an error may also be the cause of a library's own error."""
    if error is None:
        return False
    is_torch = type(error).__module__.partition(".")[0] == "torch"
    return is_torch or isinstance(error, OSError | MemoryError) or _may_pass(error.__cause__)
