"""Checkpoints with any content."""

from pathlib import Path

from storage import layout
from storage.runs.run import Run
from storage.weights.checkpoints import Checkpoints


def state(tmp_path: Path) -> Path:
    folder = tmp_path / "state"
    folder.mkdir(exist_ok=True)
    (folder / "state.json").write_text("{}")
    for name in ("optimizer.safetensors", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text(f"what {name} holds")
    return folder


def save(run: Run, tmp_path: Path, sync: int, attempt: int) -> None:
    for key in (layout.draws(sync, attempt), layout.steps(sync, attempt)):
        run.store.create(key, b"")
    Checkpoints(run).save(sync, attempt, 2 * sync, state(tmp_path))
