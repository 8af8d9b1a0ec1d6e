"""Which modules are loaded by an import of each part, and which files a wheel contains. Import-linter checks the layers
themselves in `make check`."""

import json
import pkgutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import flows
import storage
import tba

# Only processes that do the work of a role import these modules, which may import torch.
HEAVY = {
    "flows.roles.wiring", "flows.roles.model_loading", "flows.roles.number_format", "flows.roles.repeat_steps",
    "flows.roles.role",
}  # fmt: skip
LIGHT = sorted(
    {m.name for package in (storage, flows) for m in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")}
    - HEAVY
)


def imported_by(*modules: str) -> set[str]:
    script = (
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(name)\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", script, *modules], capture_output=True, text=True, check=True)
    return set(json.loads(out.stdout.splitlines()[-1]))


def test_flows_and_storage_import_without_the_machine_learning_libraries():
    assert not imported_by(*LIGHT) & {"torch", "transformers", "vllm", "wandb"}


def test_every_public_name_of_storage_can_be_loaded():
    assert [name for name in storage.__all__ if getattr(storage, name, None) is None] == []


def test_the_vocabulary_imports_with_the_standard_library_and_pydantic_alone():
    brought = imported_by("tba.types", "tba.errors", "tba.interfaces", "tba.config")
    assert not brought & {"torch", "numpy", "pyarrow", "duckdb", "prefect", "fsspec"}


def test_a_role_never_imports_prefect():
    assert "prefect" not in imported_by("flows.roles.wiring", "flows.roles.repeat_steps", "flows.roles.role")


def test_storage_and_commands_import_without_prefect():
    modules = [m for m in LIGHT if m.startswith("storage.")] + [
        "flows.cli",
        "flows.planning.resolve",
        "flows.supervision.supervisor",
    ]
    assert "prefect" not in imported_by(*modules)


def test_the_algorithm_imports_neither_databases_nor_prefect():
    brought = imported_by(
        "tba.train.trainer",
        "tba.search.searcher",
        "tba.search.evaluator",
        "tba.generation.transformers_generator",
        "tba.models.policy",
    )
    assert not brought & {"prefect", "duckdb", "wandb", "s3fs", "storage", "flows"}


@pytest.mark.parametrize("package", [tba, storage, flows], ids=["tba", "storage", "flows"])
def test_a_wheel_contains_the_files_of_a_package_that_are_no_modules(package):
    [folder] = map(Path, package.__path__)
    project = tomllib.loads((folder.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"][package.__name__]
    packed = {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    others = {path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert others and others == packed
