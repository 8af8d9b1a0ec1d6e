"""Check this machine's GPU: run the tests that need a GPU, then the measurements.

    python -m benchmarks.gpu_check [--out FOLDER] [--limit SECONDS]

`make gpu-check` runs this module. It first prints what the machine has. If vLLM is not installed, its tests and
benchmarks are left out, and the output says so. A stage that fails does not stop the next one: each has a time limit,
and FOLDER/gpu-check-<GPU>.json is written after each. Measurements are written to FOLDER/*-<GPU>.json. The exit code is
1 if anything failed, and 2 without a GPU.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import psutil
import torch

from benchmarks.harness.hardware import hardware, results_file
from flows import driver_check
from tba.runtime import nvidia

ROOT = Path(__file__).parents[2]
TESTS = ["tests/test_devices.py"]
TESTS_OF_PROFILES = ["tests/tba/generation/test_vllm_profile_engines.py"]
"""They begin with the profile `safe` and then switch each optimisation of vLLM on alone."""
TESTS_OF_VLLM = [
    "tests/tba/generation/test_vllm_generator.py",
    "tests/tba/generation/test_vllm_processes.py",
    "tests/flows/runs/test_vllm.py",
]
MEASUREMENTS = [
    ["benchmarks.gpu_check.bandwidths"],
    ["benchmarks.gpu_check.steps"],
    ["benchmarks.gpu_check.one_rank"],
    ["benchmarks.gpu_check.roles"],
    ["benchmarks.gpu_check.versions"],
    ["benchmarks.scoring"],
]
MEASUREMENTS_OF_VLLM = [["benchmarks.gpu_check.engines"], ["benchmarks.searching"]]
LIMIT = 300
"""Seconds of one stage. A stage that takes longer is ended and counts as failed."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument(
        "--limit", type=float, default=LIMIT, metavar="SECONDS", help="the most that one stage may take"
    )
    options = parser.parse_args()
    folder = options.out.absolute()
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        why = f": {nvidia.fault(torch.version.cuda)}" if nvidia.query_gpus() else ""
        print(f"error: gpu-check needs a GPU, and torch {torch.__version__}, {built}, finds none{why}", file=sys.stderr)
        return 2
    driver_check.main([])
    machine = describe()
    for name, value in machine.items():
        print(f"{name:14} {value}", flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    stages = check(folder, options.limit, with_vllm="vllm" in machine, record={"measured": today(), **machine})
    failed = [name for name, stage in stages.items() if stage["exit_code"] != 0]
    failed += [f"{name} (none ran)" for name, it in stages.items() if "tests" in it and it["tests"] == it["skipped"]]
    print(f"\n{'FAILED: ' + ', '.join(failed) if failed else 'passed'}; {results_file(folder, 'gpu-check')}")
    if "vllm" not in machine:
        print("vLLM is not installed here, so it was neither tested nor measured (docs/gpus.md)")
    return 1 if failed else 0


def check(folder: Path, limit: float, *, with_vllm: bool, record: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Run all stages. Return the exit code and the seconds of each, and of the tests how many there were."""
    stages: dict[str, dict[str, Any]] = {}

    def store(name: str, stage: dict[str, Any]) -> None:
        stages[name] = stage
        print(f"{name}: {stage}", flush=True)
        results_file(folder, "gpu-check").write_text(json.dumps({**record, "stages": stages}, indent=1) + "\n")

    store("tests", run_tests(TESTS, limit))
    for command in MEASUREMENTS:
        store(command[0], run([sys.executable, "-m", *command, "--out", str(folder)], limit))
    if with_vllm:
        store("tests of vLLM's profiles", run_tests(TESTS_OF_PROFILES, limit))
        store("tests of vLLM", run_tests(TESTS_OF_VLLM, limit))
        for command in MEASUREMENTS_OF_VLLM:
            store(command[0], run([sys.executable, "-m", *command, "--out", str(folder)], limit))
    return stages


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


def describe() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "driver": next((gpu.driver for gpu in nvidia.query_gpus()), "unknown"),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **hardware(),
    }


def run_tests(paths: list[str], limit: float = LIMIT) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "gpu or vllm", "-W", "ignore:Unclosed:ResourceWarning", f"--junitxml={report}"]
        ended = run([sys.executable, "-m", "pytest", *paths, *options], limit)
        suites = ElementTree.parse(report).getroot().iter("testsuite") if report.exists() else []
        counts = [{name: int(it.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")} for it in suites]
    return {**ended, **{name: sum(it[name] for it in counts) for name in ("tests", "failures", "errors", "skipped")}}


def run(command: list[str], limit: float) -> dict[str, Any]:
    """Run a command in the repository, so that roles find the package even if it is not installed. Return its exit code
    and its seconds."""
    print(f"\n{' '.join(command[1:])}", flush=True)
    paths, began = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])], time.monotonic()
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    with subprocess.Popen(command, cwd=ROOT, env=environment) as process:
        try:
            code: int | str = process.wait(limit)
        except BaseException as error:
            kill(process.pid)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            code = f"ended after {limit:.0f} seconds"
    return {"exit_code": code, "seconds": round(time.monotonic() - began)}


def kill(pid: int) -> None:
    """Kill a process and all its descendants. Roles and engines have sessions of their own and would live on, with
    their memory of the GPU."""
    process = psutil.Process(pid)
    for it in [process, *process.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            it.kill()


if __name__ == "__main__":
    sys.exit(main())
