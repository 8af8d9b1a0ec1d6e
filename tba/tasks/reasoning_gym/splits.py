"""Choose the problems of training and of evaluation, so that no problem is in both and none occurs twice.

A data set draws its problems at random, and may draw the same problem again: of `chain_sum` with two numbers of one
digit, for example, there are only 200. So problems that are already chosen are left out, and others are drawn until
there are enough.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import Field, JsonValue, field_validator

from tba.errors import ConfigError
from tba.seeds import seed_of
from tba.settings import Count, Positive, settings

MOST_AT_ONCE = 500
PATIENCE = 500
"""Number of problems in a row, all of them known or too long, after which a data set counts as exhausted."""
PATIENCE_WITH_PATTERN = 20_000
"""The same for a data set with a pattern, where problems that do not match it count too."""

Entry = Mapping[str, Any]
"""A problem as the library makes it: `question`, `answer` and `metadata`."""


@settings
class DataSet:
    """One data set of the mixture."""

    name: str
    """Name of a data set of reasoning_gym."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Share of the problems that come from this data set, relative to the weights of the others."""
    settings: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings of the data set, under the library's own names. Those that are left out have the library's defaults."""
    pattern: str = ""
    """Regular expression. Only problems whose question contains a match are used. Empty uses all problems."""

    @field_validator("pattern")
    @classmethod
    def _is_a_regular_expression(cls, value: str) -> str:
        try:
            re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(
                f"task.options.datasets: pattern must be a regular expression, got {value!r}: {error}"
            ) from None
        return value


@settings
class Options:
    """Which problems are asked, and how."""

    datasets: tuple[DataSet, ...]
    """The data sets: a name, an object with `name`, `weight`, `settings` and `pattern`, a list of these, or an object
    that maps each name to an object with the others."""
    train_size: Positive = 1000
    """Number of problems to train on. More problems are repeated less often."""
    test_size: Positive = 200
    """Number of problems for evaluations. None of them is trained on."""
    seed: Count = 0
    """Seed of the problems. Another seed makes other problems."""
    system: str = ""
    """System message that precedes each question. If it is empty, the chat template may add its own."""
    instruction: str = "Write only the result."
    """Text that follows each question after a blank line. It says how the answer is to be written."""

    @field_validator("datasets", mode="before")
    @classmethod
    def _names_suffice(cls, value: Any) -> Any:
        if isinstance(value, Mapping) and not isinstance(value.get("name"), str):
            value = [_with_name(name, fields) for name, fields in value.items()]
        datasets = value if isinstance(value, list | tuple) else [value]
        if not datasets:
            raise ValueError(f"task.options.datasets must name at least one data set, got {value!r}")
        return [{"name": dataset} if isinstance(dataset, str) else dataset for dataset in datasets]


def _with_name(name: str, fields: Any) -> dict[str, Any]:
    if not isinstance(fields, Mapping):
        raise ValueError(
            f'task.options.datasets.{name} must be an object, such as {{"weight": 1, "settings": {{}}}}, got {fields!r}'
        )
    return {"name": name, **fields}


Draw = Callable[[DataSet, int, int], Sequence[Entry]]
"""A function that makes problems of a data set, from a seed and a number of problems."""


def choose(options: Options, draw: Draw, fits: Callable[[str], bool]) -> dict[str, list[tuple[DataSet, Entry]]]:
    """Return the problems of both splits. `fits` says whether a question is short enough. The problems for evaluations
    are chosen first, so that they are the same for any `train_size`. Raise ConfigError if there are too few problems.
    """
    known: set[str] = set()
    splits = {}
    for split, size in (("test", options.test_size), ("train", options.train_size)):
        counts = shares([dataset.weight for dataset in options.datasets], size)
        drawers = [_Drawer(options, draw, fits, known, split, i) for i in range(len(counts))]
        chosen = [drawer.draw_new(count) for drawer, count in zip(drawers, counts, strict=True)]
        splits[split] = interleaved(
            [[(dataset, entry) for entry in new] for dataset, new in zip(options.datasets, chosen, strict=True)]
        )
    return splits


def shares(weights: Sequence[float], size: int) -> list[int]:
    """Divide a number of problems among data sets by their weights. What rounding leaves goes to the data sets that
    lost most by it."""
    exact = [size * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_loss = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
    for i in by_loss[: size - sum(counts)]:
        counts[i] += 1
    return counts


def interleaved(chosen: Sequence[Sequence[Any]]) -> list[Any]:
    """Mix the problems of several data sets evenly, so that any first part of the result is mixed by weight, too."""
    places = [((k + 0.5) / len(problems), i, k) for i, problems in enumerate(chosen) for k in range(len(problems))]
    return [chosen[i][k] for _, i, k in sorted(places)]


@dataclass
class _Drawer:
    """Draws the problems of one data set for one split."""

    options: Options
    draw: Draw
    fits: Callable[[str], bool]
    known: set[str]
    split: str
    index: int
    drawn: int = field(default=0, init=False)
    too_long: int = field(default=0, init=False)
    without_pattern: int = field(default=0, init=False)

    def draw_new(self, count: int) -> list[Entry]:
        """Return this number of new problems, and add their questions to the known ones."""
        dataset, new, in_vain, batch = self.options.datasets[self.index], list[Entry](), 0, 0
        while len(new) < count:
            if in_vain >= (PATIENCE_WITH_PATTERN if dataset.pattern else PATIENCE):
                raise self._too_few(dataset, count, len(new))
            size = min(max(count - len(new), min(count, 50)), MOST_AT_ONCE)
            # 31 bits, because NumPy takes no larger seed
            seed = seed_of(f"{self.options.seed}:reasoning-gym:{self.split}:{self.index}:{batch}") >> 32
            for entry in self.draw(dataset, seed, size):
                is_new = self._is_new(entry["question"])
                in_vain = 0 if is_new else in_vain + 1
                if is_new and len(new) < count:
                    self.known.add(entry["question"])
                    new.append(entry)
            batch += 1
        return new

    def _is_new(self, question: str) -> bool:
        self.drawn += 1
        if question in self.known:
            return False
        if not re.search(self.options.datasets[self.index].pattern, question):
            self.without_pattern += 1
            return False
        fits = self.fits(question)
        self.too_long += not fits
        return fits

    def _too_few(self, dataset: DataSet, count: int, new: int) -> ConfigError:
        length = f"; {self.too_long} were longer than search.max_prompt_tokens allows" if self.too_long else ""
        without = f"; {self.without_pattern} do not match {dataset.pattern!r}" if self.without_pattern else ""
        beside = ", beside those for evaluations" if self.split == "train" else ""
        return ConfigError(
            f"task.options.{self.split}_size: {count} problems of the data set {dataset.name!r} are needed"
            f"{beside}, but {self.drawn} draws brought only {new} different ones{length}{without}. "
            f"Lower task.options.train_size or task.options.test_size, or change the settings or the pattern of the "
            f"data set"
        )
