from pathlib import Path

import pytest

from tba.errors import ConfigError
from tba.models.location import check_place


@pytest.mark.parametrize("place", ["gpt2", "Qwen/Qwen2.5-0.5B", "a_b/c-d.e", "folder", "./folder", "in/it/folder"])
def test_folders_and_names_of_the_hub_are_places(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "in" / "it" / "folder").mkdir(parents=True)
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    check_place("model.path", place)


@pytest.mark.parametrize("place", ["/no/such/folder", "./folder", "../x", "~/x", "a/b/c", "a/", "a b", "file.json"])
def test_what_is_neither_is_refused(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file.json").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        check_place("model.path", place)
    assert (
        str(refused.value) == f"model.path must be an existing folder, a GGUF file or a name on the hub, got {place!r}"
    )
