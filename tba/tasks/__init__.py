"""What can be asked: one file per task, found here by name. Imports without torch."""

from collections.abc import Callable, Mapping

from tba.config import TaskConfig
from tba.errors import ConfigError
from tba.interfaces import Task
from tba.tasks import gsm8k, math, quickstart

Rule = Callable[[str, str], bool]  # is this response right, given the answer?

TASKS: dict[str, Callable[[TaskConfig], Task]] = {
    "quickstart": quickstart.Quickstart,
    "gsm8k": gsm8k.GSM8K,
    "math": math.Math,
}
RULES: dict[str, Mapping[str, Rule]] = {"quickstart": quickstart.RULES, "gsm8k": gsm8k.RULES, "math": math.RULES}
LATER = ("tldr", "redteam")


def get_task(config: TaskConfig | str) -> Task:
    """The task a config names; a bare name takes its defaults. ConfigError if it, or a choice within it, is unknown."""
    config = TaskConfig(name=config) if isinstance(config, str) else config
    _check(config.name)
    return TASKS[config.name](config)


def rules(task: str) -> tuple[str, ...]:
    """The ways in which a task reads an answer out of a response, its default first."""
    _check(task)
    return tuple(RULES[task])


def grade(task: str, rule: str, response: str, answer: str) -> float:
    """The reward of a response from anywhere; an empty rule takes the task's default."""
    known = rules(task)
    chosen = rule or known[0]
    if chosen not in known:
        raise ConfigError(f"rule: task {task!r} has {', '.join(known)}; got {rule!r}")
    return float(RULES[task][chosen](response, answer))


def _check(name: str) -> None:
    if name in LATER:
        raise ConfigError(f"task {name!r} is not available yet")
    if name not in TASKS:
        raise ConfigError(f"unknown task {name!r}; known: {', '.join(TASKS)}; later: {', '.join(LATER)}")
