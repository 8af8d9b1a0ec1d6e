"""Check this machine's GPU: run the tests that need a GPU, then the benchmarks.

    python -m benchmarks.gpu_check [--out FOLDER]

`make gpu-check` runs this module. It first prints what the machine has. If vLLM is not installed, its tests and
benchmarks are left out, and the output says so. Results are written to FOLDER/*-<GPU>.json. The exit code is 1 if
anything failed, and 2 without a GPU.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import torch

from benchmarks.harness.hardware import hardware, results_file

ROOT = Path(__file__).parents[1]
TESTS = ["tests/test_devices.py"]
TESTS_OF_VLLM = ["tests/tba/generation/test_vllm_generator.py", "tests/flows/runs/test_vllm.py"]
MEASUREMENTS = ["benchmarks.generation", "benchmarks.scoring", "benchmarks.weights"]
MEASUREMENTS_OF_VLLM = ["benchmarks.searching"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    folder = parser.parse_args().out.absolute()
    if not torch.cuda.is_available():
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        print(f"error: gpu-check needs a GPU, and torch {torch.__version__}, {built}, finds none", file=sys.stderr)
        return 2
    machine = describe()
    for name, value in machine.items():
        print(f"{name:14} {value}", flush=True)
    tests = run_tests(TESTS + (TESTS_OF_VLLM if machine["vllm"] else []))
    measurements = MEASUREMENTS + (MEASUREMENTS_OF_VLLM if machine["vllm"] else [])
    failed = [name for name in measurements if not run([sys.executable, "-m", name, "--out", str(folder)])]
    record = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", **machine, "tests": tests, "measurements_failed": failed}
    path = results_file(folder, "gpu-check")
    path.write_text(json.dumps(record, indent=1) + "\n")
    fine = tests["exit_code"] == 0 and tests["tests"] > tests["skipped"] and not failed
    print(f"\n{'passed' if fine else 'FAILED'}: {tests}; measurements that failed: {failed or 'none'}\n{path}")
    if not machine["vllm"]:
        print("vLLM is not installed here, so it was neither tested nor measured (docs/gpus.md)")
    return 0 if fine else 1


def describe() -> dict[str, Any]:
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return {
        "gpus": [f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus],
        "driver": driver(),
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        **hardware(),
    }


def driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {error}"
    return found.splitlines()[0] if found.strip() else "unknown"


def run_tests(paths: list[str]) -> dict[str, Any]:
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        options = ["-m", "gpu or vllm", "-W", "ignore:Unclosed:ResourceWarning", f"--junitxml={report}"]
        code = call([sys.executable, "-m", "pytest", *paths, *options])
        suites = ElementTree.parse(report).getroot().iter("testsuite") if report.exists() else []
        counts = [{name: int(it.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")} for it in suites]
    counted = {name: sum(it[name] for it in counts) for name in ("tests", "failures", "errors", "skipped")}
    return {"exit_code": code, **counted, "seconds": round(time.monotonic() - began)}


def run(command: list[str]) -> bool:
    print(f"\n{' '.join(command[1:])}", flush=True)
    return call(command) == 0


def call(command: list[str]) -> int:
    """Run a command in the repository, so that roles find the package even if it is not installed."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}).returncode


if __name__ == "__main__":
    sys.exit(main())
