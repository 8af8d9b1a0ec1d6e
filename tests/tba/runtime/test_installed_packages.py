"""Places inside installed packages, and the check that a package is as it was installed."""

import hashlib
import sys
from base64 import urlsafe_b64encode
from pathlib import Path

import pytest

from tba.errors import ConfigError
from tba.runtime.installed_packages import check_as_installed, find_in_package

MODULE, PACKAGE = "a_judge_of_texts", "A-Judge"
FILES = {"__init__.py": b"raise ImportError\n", "data/model.joblib": b"a pickle"}


def digest(content: bytes) -> str:
    return urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder of packages, in which one package is installed as pip does it."""
    site = tmp_path / "site"
    record = []
    for name, content in FILES.items():
        (site / MODULE / name).parent.mkdir(parents=True, exist_ok=True)
        (site / MODULE / name).write_bytes(content)
        record.append(f"{MODULE}/{name},sha256={digest(content)},{len(content)}")
    record += [f"{MODULE}/__pycache__/__init__.cpython-311.pyc,,", "a_judge-1.2.dist-info/RECORD,,"]
    info = site / "a_judge-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.2\n")
    (info / "RECORD").write_text("\n".join(record) + "\n")
    monkeypatch.syspath_prepend(str(site))
    return site


def check() -> None:
    check_as_installed("task.options.x", MODULE, PACKAGE)


def test_a_package_that_is_as_it_was_installed_passes_and_is_not_imported(site: Path):
    check()
    assert MODULE not in sys.modules


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_has_changed_or_is_missing_is_named(site: Path, name: str):
    file = site / MODULE / name
    file.write_bytes(b"another")
    with pytest.raises(ConfigError, match=rf"^task\.options\.x: '{file}' is not the file that was installed with"):
        check()
    if name != "__init__.py":  # without it Python would find no module
        file.unlink()
        with pytest.raises(ConfigError, match=rf"^task\.options\.x: '{file}' is not the file"):
            check()


@pytest.mark.parametrize("name", [f"{MODULE}.py", f"{MODULE}/__init__.py"])
def test_a_module_of_the_same_name_elsewhere_is_refused(
    site: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
):
    other = tmp_path / "work" / name
    other.parent.mkdir(parents=True)
    other.write_text("raise ImportError\n")
    monkeypatch.syspath_prepend(str(tmp_path / "work"))
    with pytest.raises(ConfigError, match=rf"^task\.options\.x: .* would be imported from '{other}', which does not"):
        check()
    assert MODULE not in sys.modules


def test_a_package_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / f"{MODULE}.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=rf"^task\.options\.x: the package {PACKAGE} is not installed"):
        check()


def test_a_package_may_hold_folders_and_files(site: Path):
    assert find_in_package("model.path", f"package:{MODULE}/data") == site / MODULE / "data"
    assert find_in_package("model.path", f"package:{MODULE}/data/model.joblib") == site / MODULE / "data/model.joblib"
    assert find_in_package("model.path", f"package:{MODULE}/none") == site / MODULE / "none"
    assert MODULE not in sys.modules
