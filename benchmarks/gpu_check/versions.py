"""Publish a policy with 1.5 billion weights twice, as a trainer does, and verify it as searchers do, by stages. A
version has 3 GB in bfloat16.

    python -m benchmarks.gpu_check.versions [--out FOLDER] [--small]

The stages are those of `benchmarks.publishing`, which also compares them with separate passes. Run and scratch are on
the disk of the system's temporary files.
"""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check import stage
from benchmarks.gpu_check.stage import LARGE, SMALL
from benchmarks.publishing.publisher import Publisher
from storage.runs.run import Run


def measure(small: bool) -> dict[str, Any]:
    policy = stage.random_policy(SMALL if small else LARGE)
    parameters = list(policy.model.parameters())
    seconds = [dict[str, float](), dict[str, float]()]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TBA_CACHE"] = f"{folder}/cache"
        run = Run.create(folder, "versions", config={}, sampler_sql="", code_version="")
        (scratch := Path(run.url) / ".scratch").mkdir()
        publisher = Publisher(run, scratch)
        for number in (0, 1):

            @contextmanager
            def timed(name: str, seconds: dict[str, float] = seconds[number]) -> Iterator[None]:
                began = time.perf_counter()
                yield
                seconds[name] = round(time.perf_counter() - began, 3)

            publisher.publish(policy, number, timed)
            with torch.no_grad():
                for it in parameters:
                    it.mul_(1.01)
    return {"gigabytes": round(2 * sum(it.numel() for it in parameters) / 1e9, 2), "seconds": seconds}


if __name__ == "__main__":
    stage.run("versions", __doc__, measure)
