"""Check requirements-gpu.txt, the versions that `make install-gpu` installs, without a package index. `make check` also
resolves them again."""

import re
import subprocess
import tomllib
from importlib.metadata import distributions
from pathlib import Path

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
LINES = [line for line in (ROOT / "requirements-gpu.txt").read_text().splitlines() if not line.startswith("#")]
PINS = {name: version for name, _, version in (line.partition("==") for line in LINES)}
GPU_MACHINE = {**default_environment(), "sys_platform": "linux", "platform_machine": "x86_64", "extra": ""}


def unmet(requirements: list[str], environment: dict[str, str]) -> list[str]:
    """Return the requirements that the pinned versions do not meet."""
    parsed = [Requirement(it) for it in requirements]
    apply = [it for it in parsed if it.marker is None or it.marker.evaluate(environment)]
    return [
        str(it)
        for it in apply
        if not it.specifier.contains(PINS.get(canonicalize_name(it.name), "0"), prereleases=True)
    ]


def test_every_package_has_one_version_and_no_index_is_named():
    assert len(PINS) == len(LINES) > 300
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in LINES), "run: make lock-gpu"


def test_the_versions_are_those_that_pyproject_allows():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["vllm"], *extras["dev"]]
    assert unmet(wanted, GPU_MACHINE) == [], "run: make lock-gpu"


def test_a_package_has_the_version_that_is_tested_without_a_gpu():
    tested = (ROOT / "requirements-cpu.txt").read_text().splitlines()
    assert set(tested) <= set(LINES), "run: make lock-gpu"


def test_versions_fit_together_as_far_as_their_packages_are_installed_here():
    """vLLM and the libraries of CUDA are not, so only `make check` knows what they need."""
    found = {canonicalize_name(it.metadata["Name"]): it for it in distributions() if it.metadata["Name"]}
    known = {name: it for name, it in found.items() if it.version == PINS.get(name)}
    faults = {name: unmet(it.requires or [], GPU_MACHINE) for name, it in known.items()}
    assert len(known) > 150 and {name: fault for name, fault in faults.items() if fault} == {}


def test_torch_is_built_for_the_cuda_whose_driver_is_checked_before_it_is_installed():
    """`nvidia-cudnn-cu13` is a dependency of the build of torch for CUDA 13."""
    printed = subprocess.run(
        ["make", "-n", "--no-print-directory", "install-gpu"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    steps = printed.splitlines()
    (cuda,) = re.findall(r"driver_check --cuda (\d+\.\d+)$", steps[0])
    assert PINS["nvidia-cuda-runtime"].startswith(f"{cuda}.") and f"nvidia-cudnn-cu{cuda.partition('.')[0]}" in PINS
    assert "+" not in PINS["torch"] and "-r requirements-gpu.txt" in printed
