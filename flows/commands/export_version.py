"""`tba export --version`: export a version of a run as a Hugging Face folder on this machine."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from flows.roles.threads import use_threads
from storage import layout
from storage.objects import manifest_folders
from storage.runs.attempts import chain, stands
from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.config import Config, parse
from tba.errors import ConfigError
from tba.types import Version


def export(run: Run, number: int, attempt: int | None, folder: str, *, adapter: bool = False) -> Path:
    """Copy a version, verify the copy, and return its folder, which appears only once it is complete. If the versions
    of the run are adapters, merge the adapter into its base first, unless `adapter` asks for the adapter alone."""
    config = parse(run.config)
    if adapter and not config.model.lora_rank:
        raise ConfigError(f"--adapter: {run.name} has no adapters, its model.lora_rank is 0")
    version = _find(run, number, attempt)
    with appearing(folder) as (target, unfinished):
        if config.model.lora_rank and not adapter:
            _merge(run, config, version, unfinished)
        else:
            _fetch(run, version, unfinished)
    return target


@contextmanager
def appearing(folder: str) -> Iterator[tuple[Path, Path]]:
    """Yield the path of the final folder, and an unfinished folder to fill. At the end of the `with` block, the
    unfinished folder becomes the final one. Raise ConfigError if something is at the path already or no folder can be
    made there."""
    if "://" in folder:
        raise ConfigError(f"DIR: must be a folder on this machine, got {folder}")
    target = Path(folder).absolute()
    if target.is_mount() or target == Path.cwd():
        raise ConfigError(f"DIR: {folder} is a mount point or the working directory: name a folder inside it")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{folder} exists already and is not an empty folder")
    unfinished = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    made = [parent for parent in target.parents if not parent.exists()]
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"DIR: {folder} cannot be written: {error.strerror}") from None
    try:
        yield target, unfinished
        if target.exists():
            target.rmdir()
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        with suppress(OSError):  # fails if somebody else has put something there meanwhile
            for parent in made:
                parent.rmdir()
        raise


def _find(run: Run, number: int, attempt: int | None) -> Version:
    """Return the kept version with this number and attempt. Without an attempt, only versions of the run's chain of
    attempts count. Raise ConfigError if there is no such version."""
    spans = chain(run)
    kept = [it for it in Versions(run).complete() if attempt is not None or stands(spans, it)]
    fitting = [it for it in kept if it.number == number and attempt in (None, it.attempt)]
    if not fitting:
        numbers = ", ".join(map(str, sorted({it.number for it in kept}))) or "none"
        which = f"version {number}" if attempt is None else f"version {number} of attempt {attempt}"
        raise ConfigError(f"{run.name} has no {which}; kept: {numbers}")
    return max(fitting, key=lambda it: it.order)


def _fetch(run: Run, version: Version, into: Path) -> None:
    from rich.console import Console

    prefix = layout.version(version)
    manifest = manifest_folders.read_manifest(run.store, prefix)
    size = sum(file["bytes"] for file in manifest["files"]) if manifest else 0
    with Console(stderr=True).status(f"copying version {version} ({size / 1e6:,.1f} MB)"):
        manifest_folders.fetch(run.store, prefix, into)


def _merge(run: Run, config: Config, version: Version, into: Path) -> None:
    use_threads(config)
    from transformers.utils import logging

    from flows.roles import model_loading

    logging.disable_progress_bar()
    model_loading.load_merged(run, config, version).save(into)
