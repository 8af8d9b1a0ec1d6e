"""The command of `make gpu-check` itself. It runs tests/test_devices.py, the tests of vLLM, and measurements."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_check.__main__ import MEASUREMENTS, ROOT, TESTS, TESTS_OF_PROFILES, TESTS_OF_VLLM, run, run_tests
from tests.support.devices import HAS_GPU
from tests.support.waiting import until

SOME = """
import pytest

@pytest.mark.gpu
def test_right(): ...

@pytest.mark.gpu
def test_wrong():
    assert False

@pytest.mark.gpu
@pytest.mark.skip
def test_left_out(): ...

def test_of_something_else():
    assert False
"""


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU here")
def test_without_a_gpu_the_command_ends_at_once_with_one_line(tmp_path: Path):
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: gpu-check needs a GPU") and ended.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_tests_failures_and_skipped_tests_are_counted(tmp_path: Path):
    path = tmp_path / "test_some.py"
    path.write_text(SOME)
    found = run_tests([str(path)])
    assert found.pop("seconds") < 60
    assert found == {"exit_code": 1, "tests": 3, "failures": 1, "errors": 0, "skipped": 1}


def test_a_stage_that_takes_too_long_is_ended_with_all_its_processes(tmp_path: Path):
    """A process that stays would keep its memory of the GPU, and some have sessions of their own."""
    told = tmp_path / "pid"
    stage = run(["sh", "-c", f"setsid sleep 600 & echo $! > {told}; wait"], 2)
    assert stage["exit_code"] == "ended after 2 seconds" and stage["seconds"] < 60
    until(lambda: not running(int(told.read_text())), "the process of the stage ends", 30)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_all_files_that_the_command_names_exist():
    assert all((ROOT / path).exists() for path in [*TESTS, *TESTS_OF_PROFILES, *TESTS_OF_VLLM])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["bandwidths", "one_rank", "steps", "versions"])
def test_each_measurement_works_in_small_on_any_machine(name: str, tmp_path: Path):
    module = f"benchmarks.gpu_check.{name}"
    assert [module] in MEASUREMENTS
    command = [sys.executable, "-m", module, "--small", "--out", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    [path] = tmp_path.iterdir()
    record = json.loads(path.read_text())
    away = [it["away"] for it in record.get("optimizers", {}).values()]
    away += [record["away"]["float32, packed"]["gradient"]] if name == "steps" else []
    assert all(it < 1e-3 for it in away)
    assert path.name.startswith(f"gpu-check-{name.replace('_', '-')}-") and record["small"]
