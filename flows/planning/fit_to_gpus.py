"""Fit a run to GPUs before it starts: find settings that fit by the plan of memory, or refuse, or warn."""

import socket
from collections.abc import Collection, Mapping
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from flows.planning.memory_plan import Gpus, fits
from flows.planning.model_sizes import find_policy
from flows.planning.nearest_settings import nearest
from flows.planning.plan_table import assigned, table
from flows.supervision.gpus import memory_warnings, usable
from storage.runs.control import find_state
from storage.runs.run import Run
from tba.config import Config, parse_known
from tba.errors import ConfigError, RunFailed
from tba.runtime.main_memory import main_memory
from tba.runtime.nvidia import memory_of


def fit(
    config: Config, asked: str | None, keep: Collection[str] = (), *, runs_here: bool = False
) -> tuple[Gpus | None, Mapping[str, Any]]:
    """Return the GPUs that a run is planned for, and the changes of settings with which it fits on them.

    `asked` is the value of --gpus: the number and size of GPUs, or `here` for those of this machine. Settings in `keep`
    are not changed, nor those of sections in `keep`. With `runs_here` the run is started on this machine, so its main
    memory and its engines count, as they do for `here`. If `asked` is None, the run is planned for the GPUs of this
    machine, and nothing is changed. Raise ConfigError with the numbers if no settings were found that fit.
    """
    if asked is not None and config.model.device == "cpu":
        raise ConfigError(f"--gpus does not apply where model.device is 'cpu', got {asked!r}")
    if asked is None or asked == "here":
        gpus = found_here(config)
    else:
        gpus = Gpus.parse(asked)
        if runs_here:
            _check_there(config, gpus)
            gpus = _on_this_machine(gpus)
    if gpus is None:
        if asked == "here":
            raise ConfigError(f"--gpus: there are no GPUs of known size on {socket.gethostname()}, got 'here'")
        return None, {}
    model = find_policy(config)
    if model is None:
        if asked is None or not config.model.path:  # a task makes only small policies
            return gpus, {}
        raise ConfigError(
            f"--gpus: the size of the policy is unknown on this machine: download {config.model.path!r}, or set "
            f"model.path to a folder"
        )
    changes = {} if asked is None else nearest(config, model, gpus, keep)
    if changes is not None:
        return gpus, changes
    lines = "\n".join(table(config, model, gpus))
    raise ConfigError(f"--gpus: the run does not fit on {gpus}, nor with any settings that save memory:\n{lines}")


def refuse_too_large(config: Config, asked: str, keep: Collection[str] = (), *, runs_here: bool = True) -> None:
    """Raise ConfigError if a run that keeps its settings does not fit, by its plan, on the GPUs `asked`. Name the
    settings with which a fork fits; a fork cannot change those in `keep`."""
    gpus, changes = fit(config, asked, keep, runs_here=runs_here)
    if changes and gpus and (model := find_policy(config)):
        lines = "\n".join(table(config, model, gpus))
        raise ConfigError(
            f"--gpus: the run does not fit on {gpus}, and a run keeps its settings; a fork fits with --set "
            f"{assigned(changes)}:\n{lines}"
        )


def warning(config: Config, gpus: Gpus | None, advice: str = "`--gpus here` looks for settings that do") -> str:
    """Return a warning with `advice` if by the plan a run does not fit on the GPUs. Return an empty text if it does, or
    if the size of the policy is unknown."""
    model = find_policy(config)
    if gpus is None or model is None or fits(config, model, gpus):
        return ""
    lines = "\n".join(table(config, model, gpus))
    return f"by plan the run does not fit on {gpus}; {advice}:\n{lines}"


def warnings_here(config: Config) -> list[str]:
    """Return a warning for each GPU of this machine that a run may use and another program holds memory of."""
    try:
        return memory_warnings(usable(config))
    except RunFailed:  # the driver does not answer, which a run itself would tell
        return []


def found_here(config: Config) -> Gpus | None:
    """Return the GPUs of this machine that the run may use, as if all had the size of the smallest. Return None if
    there are none, or if their sizes are unknown."""
    try:
        uuids = usable(config)
    except RunFailed:  # the driver does not answer, which a run itself would tell
        return None
    sizes = memory_of(uuids) if uuids else []
    return _on_this_machine(Gpus(len(sizes), min(sizes))) if sizes else None


def _on_this_machine(gpus: Gpus) -> Gpus:
    return replace(gpus, main_memory=main_memory(), has_vllm=find_spec("vllm") is not None)


def with_searchers(config: Config, searchers: int) -> Config:
    """Return the settings with this number of searchers, which `tba scale` can change and a replay has none of. The
    settings are only for a plan: if searchers go in step with the trainer, they are returned unchanged."""
    return config if config.sync.lag is not None else config.replace({"search.searchers": searchers})


def to_resume(run: Run, searchers: int | None = None) -> Config:
    """Return the settings for the plan of a run that is resumed with this number of searchers. Without a number, use
    the wanted number, which `tba scale` may have changed."""
    config = parse_known(run.config)
    if searchers is None and (wanted := find_state(run)):
        searchers = wanted.searchers
    return config if searchers is None else with_searchers(config, searchers)


def _check_there(config: Config, gpus: Gpus) -> None:
    """Raise ConfigError if this machine has fewer GPUs than a run was planned for."""
    if (found := len(usable(config))) < gpus.count:
        raise ConfigError(
            f"--gpus: roles may use {found} GPUs of {socket.gethostname()}, got {gpus}: --dry-run shows the plan for "
            "another machine"
        )
