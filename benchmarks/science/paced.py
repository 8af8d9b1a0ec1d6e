"""Tasks whose rounds wait instead of computing, so that many searchers fit on few cores.

    tba run benchmarks.science.paced:PacedQuickstart --set task.options.latency=2

If a searcher generates elsewhere, on its own accelerator or by a service, its round mostly waits here. So each round of
a searcher waits `task.options.latency` seconds when its rewards are computed, in addition to its own work. Everything
else is the task's own. Evaluations use held-out prompts and do not wait. The latency is an option of the task, so that
nothing else in a run has to know about it. Run the command in the folder above `benchmarks`.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from benchmarks.science.old_data.rare_answers import RareAnswers
from tba.config import Config, TaskConfig, parse_options, settings
from tba.presets import preset
from tba.tasks.quickstart import Quickstart
from tba.tasks.reasoning_gym.task import ReasoningGym
from tba.tasks.redteam import RedTeam
from tba.types import Prompt, Response, Reward


@settings
class Pace:
    latency: Annotated[float, Field(ge=0, le=3600)] = 1.0
    """Seconds that each round of a searcher waits."""

    def wait(self, asked: Sequence[tuple[Prompt, Response]]) -> None:
        """Wait if this is a round of a searcher: evaluations ask for rewards of held-out prompts only."""
        if any(prompt.prompt_id.startswith("train-") for prompt, _ in asked):
            time.sleep(self.latency)


class PacedQuickstart(Quickstart):
    rewards_vary = True  # not true, but a round whose rewards are all remembered would not wait

    def __init__(self, config: TaskConfig):
        super().__init__(config)
        self.options = parse_options(Pace, config)

    def rewards(self, asked: Sequence[tuple[Prompt, Response]]) -> list[Reward]:
        self.options.wait(asked)
        return [self.reward(prompt, response) for prompt, response in asked]

    @staticmethod
    def preset() -> Config:
        return preset("quickstart")


class PacedReasoningGym(ReasoningGym):
    rewards_vary = True  # as above

    def __init__(self, config: TaskConfig):
        self.pace, rest = paced(config)
        super().__init__(rest)

    def rewards(self, asked: Sequence[tuple[Prompt, Response]]) -> list[Reward]:
        self.pace.wait(asked)
        return [self.reward(prompt, response) for prompt, response in asked]

    @staticmethod
    def preset() -> Config:
        return preset("reasoning-gym")


class PacedRedTeam(RedTeam):
    def __init__(self, config: TaskConfig):
        self.pace, rest = paced(config)
        super().__init__(rest)

    def rewards(self, asked: Sequence[tuple[Prompt, Response]]) -> list[Reward]:
        self.pace.wait(asked)
        return super().rewards(asked)

    @staticmethod
    def preset() -> Config:
        return preset("redteam")


class PacedRareAnswers(RareAnswers):
    rewards_vary = True  # as above

    def __init__(self, config: TaskConfig):
        self.options = parse_options(Pace, config)

    def rewards(self, asked: Sequence[tuple[Prompt, Response]]) -> list[Reward]:
        self.options.wait(asked)
        return [self.reward(prompt, response) for prompt, response in asked]

    @staticmethod
    def preset() -> Config:
        return preset("quickstart")


def paced(config: TaskConfig) -> tuple[Pace, TaskConfig]:
    """Return the pace, and the configuration that is left for the task itself."""
    own: dict[str, Any] = {name: value for name, value in config.options.items() if name == "latency"}
    rest = {name: value for name, value in config.options.items() if name not in own}
    return parse_options(Pace, replace(config, options=own)), replace(config, options=rest)
