"""What can be asked: a task of ours by its name, one of an installed package by the name of its entry point, or any by
the path of its class. Imports without torch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, cast

from tba.config import Config, TaskConfig
from tba.errors import ConfigError, TBAError
from tba.interfaces import PolicyMaker, TakesOptions, Task
from tba.presets import PRESETS, preset
from tba.runtime.loading import load_class
from tba.tasks import gsm8k, math, quickstart, redteam, tldr, verifiers
from tba.tasks.guard import describe

Rule = Callable[[str, str], bool]  # is this response right, given the answer?
TaskMaker = Callable[[TaskConfig], Task]
"""Most often a class. It may have `preset()`, which gives a Config to begin with, and `rules`, for `tba grade`."""

OURS: dict[str, TaskMaker] = {
    "quickstart": quickstart.Quickstart,
    "gsm8k": gsm8k.GSM8K,
    "math": math.Math,
    "tldr": tldr.TLDR,
    "redteam": redteam.RedTeam,
    "verifiers": verifiers.Verifiers,
}
GROUP = "tba.tasks"
"""The group of entry points in which packages offer theirs."""


def get_task(config: TaskConfig | str) -> Task:
    """The task a config names; a bare name takes its defaults. ConfigError if it, or a choice within it, is unknown."""
    config = TaskConfig(name=config) if isinstance(config, str) else config
    make = find_task(config.name)
    with _telling(f"{config.name!r} cannot be made by __init__(self, config)", make):
        task = make(config)
    lacking = [name for name in ("source", "prompts", "reward") if not callable(getattr(task, name, None))]
    if not hasattr(task, "name"):
        lacking.insert(0, "name")
    if lacking:
        raise ConfigError(f"task.name: {config.name!r} is no task: it has no {', no '.join(lacking)}")
    if config.options and not isinstance(task, TakesOptions):
        first = f"task.options.{next(iter(config.options))}"
        raise ConfigError(
            f"unknown setting {first!r}: task {config.name!r} takes no options, it has no attribute 'options'"
        )
    return task


def policy_maker(task: Task) -> PolicyMaker:
    """The task as what makes the policy to start from, where no other is named."""
    if not isinstance(task, PolicyMaker):
        raise ConfigError(f"model.path is empty, and task {task.name!r} makes no policy of its own")
    return task


def find_task(name: str) -> TaskMaker:
    """What makes the task of that name: ours, an entry point, or a path such as `package.module:Class`."""
    if name in OURS:
        return OURS[name]
    if found := entry_points(group=GROUP, name=name):
        return cast(TaskMaker, load_class("task.name", name, next(iter(found)).load))
    if "/" not in name and not name.endswith(".py") and ("." in name or ":" in name):
        return cast(TaskMaker, load_class("task.name", name))
    raise ConfigError(
        f"task.name: unknown task {name!r}; known: {', '.join(known_tasks())}; or the path of a class, "
        "such as package.module:Class"
    )


def known_tasks() -> tuple[str, ...]:
    return (*OURS, *sorted(entry_points(group=GROUP).names - OURS.keys()))


def preset_of(name: str) -> Config:
    """The settings that a task brings with it; of one from elsewhere that brings none, the defaults of all settings."""
    if name in PRESETS:
        return preset(name)
    own = getattr(find_task(name), "preset", None)
    with _telling(f"preset(), a static method, of {name!r} fails", own):
        config = own() if own else Config()
    if not isinstance(config, Config):
        raise ConfigError(f"task.name: preset() of {name!r} must give a tba.config.Config, got {config!r}")
    return config.replace({"task.name": name})


def rules(task: str) -> Mapping[str, Rule]:
    """The ways in which a task reads an answer out of a response, its default first."""
    if found := getattr(find_task(task), "rules", None):
        return found
    raise ConfigError(
        f"task {task!r} has no rule by which a response is right or wrong, given an answer; of ours "
        f"{', '.join(name for name in OURS if hasattr(OURS[name], 'rules'))} have"
    )


def grade(task: str, rule: str, response: str, answer: str) -> float:
    """The reward of a response from anywhere; an empty rule takes the task's default."""
    known = rules(task)
    chosen = rule or next(iter(known))
    if chosen not in known:
        raise ConfigError(f"rule: task {task!r} has {', '.join(known)}; got {rule!r}")
    return float(known[chosen](response, answer))


@contextmanager
def _telling(what: str, made: Any) -> Iterator[None]:
    """While code of a task runs that may be anybody's and raise anything."""
    try:
        yield
    except TBAError:
        raise
    except Exception as error:
        raise ConfigError(f"task.name: {what}: {describe(error, made)}") from error
