"""An evaluator over fakes, and what it has written."""

from collections.abc import Sequence
from typing import Any

from benchmarks.harness import fakes
from tba.interfaces import Task
from tba.presets import preset
from tba.search.evaluator import Evaluator
from tba.types import Example, Score, Version


class Evaluations:
    def __init__(self) -> None:
        self.written: list[Score] = []
        self.examples: list[Example] = []

    def write(self, scores: Sequence[Score], examples: Sequence[Example]) -> None:
        self.written += scores
        self.examples += examples

    def done(self) -> set[Version]:
        return {score.version for score in self.written}


def evaluator(
    *newest: Version,
    every: int = 10,
    samples: int = 2,
    broken: dict[Version, Exception] | None = None,
    task: Task | None = None,
    reference: fakes.Scorer | None = None,
    **changes: Any,
) -> tuple[Evaluator, Evaluations]:
    config = preset("quickstart").replace(
        {
            "evaluation.every": every, "evaluation.samples": samples, "training.steps": 40, "sync.every": 2,
            "search.temperature": 0.7, "search.top_p": 0.9,
            **{f"evaluation.{name}": it for name, it in changes.items()},
        }
    )  # fmt: skip
    evaluations = Evaluations()
    role = Evaluator(
        config,
        prompts=fakes.make_prompts(5),
        task=task or fakes.Task(),
        generator=fakes.Generator(),
        reference=reference,
        versions=fakes.Versions(*newest, broken=broken),
        evaluations=evaluations,
        lease=fakes.Lease(stop_at=1000),
        events=fakes.Events(),
    )
    return role, evaluations


def kinds(role: Evaluator) -> list[str]:
    assert isinstance(role.events, fakes.Events)
    return role.events.kinds
