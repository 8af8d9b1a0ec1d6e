"""The process in which the library reasoning_gym runs: `python -m tba.tasks.reasoning_gym.library_process`. The other
side is `tba.tasks.reasoning_gym.library`."""

import dataclasses
import io
import json
import math
import random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir, redirect_stdout
from difflib import get_close_matches
from functools import lru_cache
from importlib import import_module
from tempfile import TemporaryDirectory
from typing import Any

from pydantic import TypeAdapter, ValidationError

from tba.runtime.limited_helper import cpu_limit, obey
from tba.tasks.reasoning_gym.entries import decode, encode
from tba.tasks.reasoning_gym.evaluated_answers import is_safe

REFUSED = {"composite": "it mixes data sets, which task.options.datasets itself does"}
"""Data sets that cannot be used, each with the reason."""
OURS = ("seed", "size")
"""Settings of every data set that follow from the options of the task."""


class Refused(Exception):
    """A data set or its settings are wrong. The message is for the person who chose them."""


class Process:
    """Answers the orders of a role."""

    def __init__(self, seconds: float):
        import numpy as np

        warnings.simplefilter("ignore")  # scorers warn of answers that they cannot read
        self.seconds, self.numpy = seconds, np
        self.known = import_module("reasoning_gym").factory.DATASETS  # imports every data set
        self.scorer = lru_cache(maxsize=64)(self._scorer)

    def answer(self, order: Sequence[Any]) -> Any:
        do, *arguments = order
        method = {"check": self.check, "draw": self.draw, "score": self.score}[do]
        try:
            with redirect_stdout(io.StringIO()):  # some data sets print
                return {"is": method(*arguments)}
        except Refused as refused:
            return {"refused": str(refused)}

    def check(self, datasets: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        for i, (name, settings) in enumerate(datasets):
            self._make(name, settings, 0, 1, where=f"task.options.datasets.{i}")

    def draw(self, name: str, settings: Mapping[str, Any], seed: int, size: int) -> list[Any]:
        random.seed(seed)  # some data sets draw from the global generators
        self.numpy.random.seed(seed)
        dataset = self._make(name, settings, seed, size)
        try:
            with TemporaryDirectory() as folder, chdir(folder):  # codeio runs programs, and some of them write files
                return [encode(dataset[i]) for i in range(size)]
        except Exception as error:
            raise Refused(
                f"task.options.datasets: the data set {name!r} makes no problems with its settings: "
                f"{type(error).__name__}: {error}"
            ) from error

    def score(self, name: str, settings: Mapping[str, Any], entry: Any, answer: str | None) -> float | None:
        scorer, problem = self.scorer(name, json.dumps(settings)), decode(entry)
        try:
            with cpu_limit(self.seconds):
                is_scored = answer is None or is_safe(name, answer, problem)
                value = float(scorer(answer if is_scored else None, problem))
        except Exception:
            return None
        return value if math.isfinite(value) else None

    def _scorer(self, name: str, settings: str) -> Callable[[str | None, Any], float]:
        return self._make(name, json.loads(settings), 0, 10).score_answer

    def _make(
        self, name: str, settings: Mapping[str, Any], seed: int, size: int, *, where: str = "task.options.datasets"
    ) -> Any:
        """Make a data set. Raise Refused if the name or a setting is unknown or wrong."""
        if name in REFUSED:
            raise Refused(f"{where}.name: {name!r} cannot be used: {REFUSED[name]}")
        if name not in self.known:
            similar = get_close_matches(name, self.known, n=5, cutoff=0.5)
            hint = f"did you mean {' or '.join(similar)}?" if similar else f"known: {', '.join(sorted(self.known))}"
            raise Refused(f"{where}.name must be a data set of reasoning_gym, got {name!r}; {hint}")
        kind, settings_kind = self.known[name]
        fields = [field.name for field in dataclasses.fields(settings_kind) if field.name not in OURS]
        for field, value in settings.items():
            if field in OURS:
                ours = "task.options.seed" if field == "seed" else "task.options.train_size and task.options.test_size"
                raise Refused(f"{where}.settings.{field} must be left out, because {ours} says it, got {value!r}")
            if field not in fields:
                raise Refused(
                    f"unknown setting '{where}.settings.{field}' of the data set {name!r}; known: {', '.join(fields)}"
                )
        try:
            config = TypeAdapter(settings_kind).validate_python({**settings, "seed": seed, "size": size})
            if hasattr(config, "validate"):
                config.validate()
            return kind(config)
        except ValidationError as error:
            first = error.errors()[0]
            path = ".".join(map(str, (f"{where}.settings", *first["loc"])))
            raise Refused(f"{path}: {first['msg']}, got {first['input']!r}") from error
        except Exception as error:
            given = ", ".join(f"{key}={value!r}" for key, value in settings.items())
            raise Refused(f"{where}.settings: the data set {name!r} refuses {given}: {error}") from error


if __name__ == "__main__":
    obey(lambda: Process(float(sys.argv[1])).answer)
