"""From what a person asks for to a run that exists: settings resolved, arithmetic shown, the run created or found.

Knows neither Prefect nor torch.
"""

import os
import re
import tempfile
from collections.abc import Mapping
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from flows.progress import bar
from flows.roles.engines import choose, evaluation_sampling, search_sampling
from flows.supervision.gpus import usable
from flows.supervision.webhook import address_of_webhook
from storage.buffer.sampler import check_sampler, default_sampler
from storage.queries.difficulty import Known, ask
from tba.config import Config
from tba.errors import ConfigError
from tba.models.folder import check_folder
from tba.models.location import check_place
from tba.search.scoring import check_can_remember
from tba.search.values import check_can_value
from tba.tasks.registry import get_task, policy_maker, preset_of

FLAT = {"steps": "training.steps", "searchers": "search.searchers", "seed": "seed"}
"""Parameters with a name of their own, and the setting each stands for."""


def resolve(
    task: str, overrides: Mapping[str, Any] | None = None, *, runs_here: bool = True, **flat: int | None
) -> Config:
    """The settings a task brings, with changes; raises ConfigError naming the field at fault before anything starts.
    Folders and GPUs are those of this machine if the roles run here."""
    changes = dict(overrides or {})
    for name, value in flat.items():
        if value is not None:
            changes[FLAT[name]] = value
    if forked := [key for key in changes if key.split(".")[0] == "start"]:
        raise ConfigError(f"{forked[0]}: only `tba fork` sets it")
    config = checked(preset_of(task).replace(changes))
    address_of_webhook()  # of whoever supervises, which is this process
    if runs_here and config.model.path and "://" not in config.model.path:
        check_place("model.path", config.model.path)
        if (folder := Path(config.model.path)).is_dir():
            check_folder("model.path", folder, longest=config.longest)
    if runs_here:
        check_rows(config)
    if runs_here and max(config.engine.gpus, config.training.ranks) > 1:
        usable(config, config.engine.gpus, config.training.ranks)
    if config.engine.name == "vllm":
        installed = not runs_here or find_spec("vllm") is not None
        for sampling in (search_sampling(config), evaluation_sampling(config, reads_logps=False)):
            choose(config, sampling, device="", installed=installed)
    read_sampler(config)
    known = ask_earlier_run(config)
    return config.replace({"search.prompts_from": known.url}) if known else config  # whoever reads it, and wherever


def check_rows(config: Config) -> None:
    """That files of rows which the settings name are on this machine; those at a URL are not asked for."""
    for split in ("train", "test"):
        place = getattr(config.task, split)
        if place and "://" not in place and not glob(place) and not Path(place).exists():
            raise ConfigError(f"task.{split}: no such file, got {place!r}")


def checked(config: Config) -> Config:
    """The settings themselves, if they can be run; ConfigError if not."""
    task = get_task(config.task)
    check_can_value(task, config.search)
    check_can_remember(task, config.search.remembered_rewards)
    if not config.model.path:
        policy_maker(task)
    return config


def short_name(task: str) -> str:
    """Of a task that is the path of a class, the class: what the name of a run begins with."""
    return re.split("[.:]", task)[-1]


def lasting(root: str) -> str:
    """A root that is still there when the program has ended: a worker of Prefect starts a run in a temporary folder."""
    if "://" not in root and not Path(root).is_absolute() and is_temporary(Path.cwd()):
        raise ConfigError(
            f"root: {root!r} would lie in the temporary folder {os.getcwd()}; "
            "give an absolute path or a URL, or start the worker with TBA_HOME set to a folder"
        )
    return root


def read_sampler(config: Config) -> str:
    """The sampler's SQL, checked."""
    path = config.sampling.sql
    if not path:
        return default_sampler()
    try:
        sampler = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"sampling.sql: {path!r} cannot be read: {error}") from None
    check_sampler(sampler)
    return sampler


def ask_earlier_run(config: Config) -> Known | None:
    """What the run says that prompts are chosen by; None if there is none."""
    search = config.search
    if not search.prompts_from:
        return None
    with bar(f"copying what is new of {search.prompts_from}") as tell:
        return ask(search.prompts_from, search.prompts_where, needed=search.prompts_per_round, progress=tell)


def is_temporary(folder: Path) -> bool:
    """Whether a folder is one that a process worker has made for a run."""
    return folder.parent == Path(tempfile.gettempdir()).resolve() and folder.name.endswith("prefect")
