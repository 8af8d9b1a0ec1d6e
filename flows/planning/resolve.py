"""Resolve the settings of a run: the preset of a task plus changes, checked before anything starts.

This module imports neither Prefect nor torch.
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
from tba.config import Config, CustomEngine, VLLMEngine
from tba.errors import ConfigError
from tba.models.folder import check_folder
from tba.models.gguf_files import check_gguf, is_gguf
from tba.models.location import check_place, local_path
from tba.runtime.loading import load_class
from tba.search.scoring import check_can_remember
from tba.search.values import check_can_value
from tba.tasks.registry import get_task, policy_maker, preset_of

FLAT = {"steps": "training.steps", "searchers": "search.searchers", "seed": "seed"}
"""The parameters of `resolve` that have a name of their own, and the setting that each of them changes."""


def resolve(
    task: str,
    overrides: Mapping[str, Any] | None = None,
    *,
    runs_here: bool = True,
    uses_gpus_here: bool = True,
    trains_here: bool = True,
    **flat: int | None,
) -> Config:
    """Return the settings of a task with the changes applied. Raise ConfigError, which names the setting at fault, if a
    setting cannot work. If the roles run here, also check that the folders, files and, with `uses_gpus_here`, GPUs that
    the settings need are on this machine; the trainer's GPUs need not be here without `trains_here`."""
    changes = dict(overrides or {})
    for name, value in flat.items():
        if value is not None:
            changes[FLAT[name]] = value
    if forked := [key for key in changes if key.split(".")[0] == "start"]:
        raise ConfigError(f"{forked[0]}: only `tba fork` sets it")
    config = checked(preset_of(task).replace(changes))
    address_of_webhook()  # raises if it is malformed: this process is going to supervise the run
    if runs_here and config.model.path and "://" not in config.model.path:
        check_place("model.path", config.model.path)
        if is_gguf(config.model.path):
            check_gguf("model.path", config.model.path, longest=config.longest)
        elif (folder := local_path("model.path", config.model.path)).is_dir():
            check_folder("model.path", folder, longest=config.longest)
    if runs_here:
        check_rows(config)
    ranks = config.training.ranks if trains_here else 1
    if runs_here and uses_gpus_here and max(config.engine.gpus, ranks) > 1:
        usable(config, config.engine.gpus, ranks)
    check_engine(config, runs_here=runs_here, uses_gpus_here=runs_here and uses_gpus_here)
    if runs_here and isinstance(config.engine, CustomEngine):
        load_class("engine.name", config.engine.name)
    read_sampler(config)
    known = ask_earlier_run(config)
    # The URL, unlike a name or a relative path, means the same run on every machine.
    return config.replace({"search.prompts_from": known.url}) if known else config


def check_engine(config: Config, *, runs_here: bool, uses_gpus_here: bool) -> None:
    """Raise ConfigError if the settings demand vLLM, but vLLM cannot do what they ask for."""
    engine, device = config.engine, config.model.device.partition(":")[0]
    if not isinstance(engine, VLLMEngine) or (engine.name == "auto" and not engine.quantization):
        return
    if device == "auto":  # unknown where the roles run elsewhere
        device = ("cuda" if usable(config) else "cpu") if uses_gpus_here else ""
    installed = not runs_here or find_spec("vllm") is not None
    for sampling in (search_sampling(config), evaluation_sampling(config, reads_logps=False)):
        choose(config, sampling, device=device, installed=installed)


def changed_settings(overrides: Mapping[str, Any] | None, flat: Mapping[str, int | None]) -> set[str]:
    """Return the names of the settings that arguments of `resolve` change."""
    return {*(overrides or {}), *(FLAT[name] for name, value in flat.items() if value is not None)}


def check_rows(config: Config) -> None:
    """Raise ConfigError if `task.train` or `task.test` names a file that is not on this machine. URLs are not
    checked."""
    for split in ("train", "test"):
        place = getattr(config.task, split)
        if place and "://" not in place and not glob(place) and not Path(place).exists():
            raise ConfigError(f"task.{split}: no such file, got {place!r}")


def checked(config: Config) -> Config:
    """Return the settings unchanged. Raise ConfigError if the task cannot do what they ask for."""
    task = get_task(config.task)
    check_can_value(task, config.search)
    check_can_remember(task, config.search.remembered_rewards)
    if not config.model.path:
        policy_maker(task)
    return config


def short_name(task: str) -> str:
    """Return the name of a task, or only the class if the task is given as the path of a class. Default names of runs
    begin with it."""
    return re.split("[.:]", task)[-1]


def lasting(root: str) -> str:
    """Return `root` unchanged. Raise ConfigError if `root` is a relative path and the working directory is the
    temporary folder of a Prefect worker: the worker deletes this folder when the run has ended."""
    if "://" not in root and not Path(root).is_absolute() and is_temporary(Path.cwd()):
        raise ConfigError(
            f"root: {root!r} would be inside the temporary folder {os.getcwd()}, which is deleted after the run: give "
            "an absolute path or a URL, or set TBA_HOME to a folder where the worker is started"
        )
    return root


def read_sampler(config: Config) -> str:
    """Return the SQL of the sampler: the file that `sampling.sql` names, checked, or the built-in sampler."""
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
    """Return the prompts of the run in `search.prompts_from`, and which of them `search.prompts_where` chooses. Return
    None if `search.prompts_from` is empty."""
    search = config.search
    if not search.prompts_from:
        return None
    with bar(f"copying new objects of {search.prompts_from}") as tell:
        return ask(search.prompts_from, search.prompts_where, needed=search.prompts_per_round, progress=tell)


def is_temporary(folder: Path) -> bool:
    """Return True if this is the temporary folder that a Prefect process worker makes for each run."""
    return folder.parent == Path(tempfile.gettempdir()).resolve() and folder.name.endswith("prefect")
