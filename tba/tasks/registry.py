"""Find tasks: a built-in task by its name, a task of an installed package by the name of its entry point, or any task
by the path of its class. Importing this module does not import torch.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, cast

from tba.config import Config, TaskConfig
from tba.errors import ConfigError, TBAError
from tba.interfaces import PolicyMaker, TakesOptions, Task
from tba.presets import PRESETS, preset, task_of
from tba.runtime.loading import class_at, load_class
from tba.tasks.guard import describe

Rule = Callable[[str, str], bool]  # takes the response and the gold answer, returns whether the response is right
TaskMaker = Callable[[TaskConfig], Task]
"""A function that makes a task from its config; usually the class of the task. It may have a method `preset()`, which
returns the default Config, and an attribute `rules`, which `tba grade` uses."""

OURS = {
    "quickstart": "tba.tasks.quickstart:Quickstart",
    "gsm8k": "tba.tasks.gsm8k:GSM8K",
    "math": "tba.tasks.math:Math",
    "tldr": "tba.tasks.tldr:TLDR",
    "redteam": "tba.tasks.redteam:RedTeam",
    "instructions": "tba.tasks.instructions.task:Instructions",
    "verifiers": "tba.tasks.verifiers:Verifiers",
    "reasoning-gym": "tba.tasks.reasoning_gym.task:ReasoningGym",
}
"""The built-in tasks: the path of each class."""
GROUP = "tba.tasks"
"""The group of entry points in which installed packages declare their tasks."""


def get_task(config: TaskConfig | str) -> Task:
    """Make the task that a config names. If only a name is passed, the task has its default settings. Raise ConfigError
    if the task or one of its settings is unknown."""
    config = TaskConfig(name=config) if isinstance(config, str) else config
    make = find_task(config.name)
    with _telling(f"__init__(self, config) of {config.name!r} fails", make):
        task = make(config)
    lacking = [name for name in ("source", "prompts", "reward") if not callable(getattr(task, name, None))]
    if not hasattr(task, "name"):
        lacking.insert(0, "name")
    if lacking:
        raise ConfigError(f"task.name: {config.name!r} is not a task: it has no {', no '.join(lacking)}")
    if config.options and not isinstance(task, TakesOptions):
        first = f"task.options.{next(iter(config.options))}"
        raise ConfigError(
            f"unknown setting {first!r}: task {config.name!r} takes no options, because it has no attribute 'options'"
        )
    return task


def policy_maker(task: Task) -> PolicyMaker:
    """Return the task if it can make its own base policy. Otherwise raise ConfigError, because `model.path` must then
    be set."""
    if not isinstance(task, PolicyMaker):
        raise ConfigError(f"model.path must be set, because task {task.name!r} makes no policy of its own")
    return task


def find_task(name: str) -> TaskMaker:
    """Return the function or class that makes the task of a name: a built-in task, an entry point, or a path such as
    `package.module:Class`."""
    if name in OURS:
        return class_at(OURS[name])
    if matches := entry_points(group=GROUP, name=name):
        return cast(TaskMaker, load_class("task.name", name, next(iter(matches)).load))
    if "/" not in name and not name.endswith(".py") and ("." in name or ":" in name):
        return cast(TaskMaker, load_class("task.name", name))
    if name in PRESETS:
        raise ConfigError(
            f"task.name must be the name of a task, got {name!r}, a preset of the task {task_of(name)!r}: "
            f"`tba run {name}`"
        )
    raise ConfigError(
        f"task.name: unknown task {name!r}; known: {', '.join(known_tasks())}; or the path of a class, "
        "such as package.module:Class"
    )


def known_tasks() -> tuple[str, ...]:
    """Return the names that `tba run` knows: built-in tasks, further presets, and the entry points of packages."""
    ours = dict.fromkeys([*OURS, *PRESETS])
    return (*ours, *sorted(entry_points(group=GROUP).names - ours.keys()))


def preset_of(name: str) -> Config:
    """Return the settings of a preset, by its own name or by that of its task. For a task without a preset, return the
    defaults of all settings."""
    if name in PRESETS:
        return preset(name)
    own = getattr(find_task(name), "preset", None)
    with _telling(f"the static method preset() of {name!r} fails", own):
        config = own() if own else Config()
    if not isinstance(config, Config):
        raise ConfigError(f"task.name: preset() of {name!r} must return a tba.config.Config, got {config!r}")
    return config.replace({"task.name": name})


def rules(task: str) -> Mapping[str, Rule]:
    """Return a task's rules for grading a response, as a mapping from names to rules. The first rule is the default."""
    if own := getattr(find_task(task_of(task)), "rules", None):
        return own
    raise ConfigError(
        f"task {task!r} has no rules that grade a response by an answer; built-in tasks with rules: "
        f"{', '.join(name for name in OURS if hasattr(find_task(name), 'rules'))}"
    )


def grade(task: str, rule: str, response: str, answer: str) -> float:
    """Return the reward of a response by a rule of a task. An empty rule means the task's default rule."""
    known = rules(task)
    chosen = rule or next(iter(known))
    if chosen not in known:
        raise ConfigError(f"rule must be one of {', '.join(known)} for task {task!r}, got {rule!r}")
    return float(known[chosen](response, answer))


@contextmanager
def _telling(what: str, made: Any) -> Iterator[None]:
    """Convert errors in a task's code to a ConfigError. The task may be a user's own, so its code may raise any
    error."""
    try:
        yield
    except TBAError:
        raise
    except Exception as error:
        raise ConfigError(f"task.name: {what}: {describe(error, made)}") from error
