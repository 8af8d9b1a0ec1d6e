"""`tba export`: a version of a run as a Hugging Face folder anywhere on this machine."""

import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.threads import use_threads
from storage import folders, layout
from storage.run import Run
from storage.versions import Versions
from tba.config import Config, parse
from tba.errors import ConfigError
from tba.types import Version


def export(run: Run, number: int, attempt: int | None, folder: str, *, adapter: bool = False) -> Path:
    """Copy a version and verify it; the folder appears only when all of it is there. Where versions are adapters, merge
    it into its base first, unless `adapter` is wanted by itself."""
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
    """Where a folder is to be, and one to fill that becomes it once all has been written. ConfigError if something is
    there already, or nothing can be."""
    target = Path(folder).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"{folder} exists already and is not an empty folder")
    unfinished = target.parent / f".{target.name}.{secrets.token_hex(4)}"
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"DIR: {folder} cannot be written: {error.strerror}") from None
    try:
        yield target, unfinished
        if target.exists():
            target.rmdir()
        unfinished.rename(target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _find(run: Run, number: int, attempt: int | None) -> Version:
    kept = Versions(run).complete()
    fitting = [it for it in kept if it.number == number and attempt in (None, it.attempt)]
    if not fitting:
        numbers = ", ".join(map(str, sorted({it.number for it in kept}))) or "none"
        which = f"version {number}" if attempt is None else f"version {number} of attempt {attempt}"
        raise ConfigError(f"{run.name} has no {which}; kept: {numbers}")
    return max(fitting, key=lambda it: it.order)


def _fetch(run: Run, version: Version, into: Path) -> None:
    from rich.console import Console

    prefix = layout.version(version)
    manifest = folders.read_manifest(run.store, prefix)
    size = sum(file["bytes"] for file in manifest["files"]) if manifest else 0
    with Console(stderr=True).status(f"copying version {version} ({size / 1e6:,.1f} MB)"):
        folders.fetch(run.store, prefix, into)


def _merge(run: Run, config: Config, version: Version, into: Path) -> None:
    use_threads(config.model.threads)
    from transformers.utils import logging

    from flows import wiring

    logging.disable_progress_bar()
    wiring.load_merged(run, config, version).save(into)
