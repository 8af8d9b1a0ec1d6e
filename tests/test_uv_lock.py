"""Check that `uv sync` installs what `make install` installs: the packages of requirements-cpu.txt and a CPU torch."""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = tomllib.loads((ROOT / "uv.lock").read_text())
PACKAGES: list[dict[str, Any]] = LOCK["package"]
HOSTS = {"pypi.org", "files.pythonhosted.org", "download.pytorch.org", "download-r2.pytorch.org"}


def test_the_lock_has_the_versions_that_make_install_installs():
    pins = re.findall(r"^(\S+)==(\S+)$", (ROOT / "requirements-cpu.txt").read_text(), re.MULTILINE)
    pins += re.findall(r"--no-deps -e \. (\S+)==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    installed = {(re.sub(r"[-_.]+", "-", name).lower(), version) for name, version in pins}
    locked = {(package["name"], package["version"].removesuffix("+cpu")) for package in PACKAGES}
    own = {(package["name"], package["version"]) for package in PACKAGES if package["source"] == {"editable": "."}}
    assert locked - own == installed, "run: uv lock $(sed 's/^/-P /' requirements-cpu.txt)"


def test_the_lock_has_the_cpu_build_of_torch():
    torch = next(package for package in PACKAGES if package["name"] == "torch")
    assert torch["version"].endswith("+cpu")
    assert torch["source"] == {"registry": "https://download.pytorch.org/whl/cpu"}


def test_the_lock_names_public_indexes_alone():
    assert set(re.findall(r'"\w+://([^/"]+)', (ROOT / "uv.lock").read_text())) == HOSTS


def test_every_file_in_the_lock_has_a_hash():
    files = [file for package in PACKAGES for file in [*package.get("wheels", []), package.get("sdist")] if file]
    assert files and all(file["hash"].startswith("sha256:") for file in files)
