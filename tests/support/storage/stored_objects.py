"""Access to the objects of a run, past the code that writes them."""

from pathlib import Path

from storage.runs.run import Run


def path_of(run: Run, key: str) -> Path:
    path = run.store.local_path(key)
    assert path is not None
    return path


def overwrite(run: Run, key: str, data: bytes) -> None:
    run.store.delete(key)
    run.store.create(key, data)
