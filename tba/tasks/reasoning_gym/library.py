"""The library reasoning_gym, in a helper process (`tba.tasks.reasoning_gym.library_process`).

The library has a process of its own for three reasons. Scorers may take forever on some answers, and this process can
be killed. Which problems some data sets make depends on Python's hash seed and on the state of global random numbers,
which this process sets. And importing the library takes a second that the commands do not need.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from typing import Any

from tba.errors import ConfigError, RunFailed
from tba.runtime.limited_helper import LimitedHelper
from tba.tasks.reasoning_gym.splits import DataSet, Entry

SECONDS = 5.0  # CPU time of the helper to score one answer
PATIENCE = 60.0  # wall-clock seconds to score one answer
DRAWING_PATIENCE = 900.0  # wall-clock seconds to draw up to 500 problems, or to check data sets


class Library:
    """The library, as seen by a role. `close` ends its process; the next call starts another one."""

    def __init__(self, *, seconds: float = SECONDS, patience: float = PATIENCE):
        module = "tba.tasks.reasoning_gym.library_process"
        self.helper = LimitedHelper("the process of reasoning_gym", module, str(seconds), patience=patience)

    def check(self, datasets: Sequence[DataSet]) -> None:
        """Raise ConfigError if a data set or one of its settings is unknown or wrong."""
        self._order("check", [[dataset.name, dataset.settings] for dataset in datasets])

    def draw(self, dataset: DataSet, seed: int, size: int) -> list[Entry]:
        """Return problems of a data set, as JSON."""
        return self._order("draw", dataset.name, dataset.settings, seed, size)

    def score(self, dataset: str, settings: dict[str, Any], entry: Entry, answer: str | None) -> float | None:
        """Return the score that the data set's own scorer gives to an answer, usually a number between 0 and 1. An
        answer of None means that the response has none. Return None if the scorer fails or takes too long."""
        reply = self.helper.order(["score", dataset, settings, entry, answer])
        return None if reply is None else _result(reply)

    def close(self) -> None:
        self.helper.close()

    def _order(self, *order: Any) -> Any:
        reply = self.helper.order(order, patience=DRAWING_PATIENCE)
        if reply is None:
            raise RunFailed(
                f"the process of reasoning_gym ended, or needed more than {DRAWING_PATIENCE:.0f} s, for the order "
                f"{json.dumps(order):.200}"
            )
        return _result(reply)


def _result(reply: Mapping[str, Any]) -> Any:
    if "refused" in reply:
        raise ConfigError(reply["refused"])
    return reply["is"]


def check_datasets(datasets: Sequence[DataSet]) -> None:
    """Check the settings of data sets as `Library.check` does. The process of the library does not stay, because the
    process that starts a run does not need it."""
    _check(json.dumps([[dataset.name, dataset.settings] for dataset in datasets]))


@lru_cache(maxsize=16)  # a command makes the same task several times
def _check(datasets: str) -> None:
    with closing(Library()) as library:
        library.check([DataSet(name=name, settings=settings) for name, settings in json.loads(datasets)])
