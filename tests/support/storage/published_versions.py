"""Published versions with any weights."""

from pathlib import Path

import pytest

from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.types import Version


def weights(tmp_path: Path, name: object) -> Path:
    folder = tmp_path / f"weights-{name}"
    folder.mkdir(exist_ok=True)
    (folder / "model.safetensors").write_bytes(str(name).encode())
    return folder


def publish(run: Run, tmp_path: Path, *versions: tuple[int, int]) -> None:
    for version in versions:
        Versions(run).publish(
            Version(*version), step=version[0] * 2, folder=weights(tmp_path, version), weights_sha256=""
        )


def count_downloads(run: Run, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    fetched: list[str] = []
    download = run.store.download

    def counted(key: str, path: Path) -> None:
        fetched.append(key)
        download(key, path)

    monkeypatch.setattr(run.store, "download", counted)
    return fetched
