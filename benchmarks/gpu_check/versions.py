"""Publish a policy with 1.5 billion weights twice, as a trainer does, and verify it as searchers do, by stages. A
version has 3 GB in bfloat16.

    python -m benchmarks.gpu_check.versions [--out FOLDER] [--small]

The stages are those of `benchmarks.publishing`, which also compares them with separate passes. Run and scratch are on
the disk of the system's temporary files.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_check import stage
from benchmarks.gpu_check.stage import LARGE, SMALL
from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.types import Version


def measure(small: bool) -> dict[str, Any]:
    policy = stage.random_policy(SMALL if small else LARGE)
    with tempfile.TemporaryDirectory() as name:
        folder, before = Path(name), None
        os.environ["TBA_CACHE"] = f"{folder}/cache"
        run = Run.create(str(folder), "versions", config={}, sampler_sql="", code_version="")
        scratch = Path(run.url) / ".scratch"
        scratch.mkdir()
        found = list[dict[str, float]]()
        for number in (0, 1):
            seconds = dict[str, float]()
            began = time.perf_counter()

            def done(what: str, seconds: dict[str, float] = seconds) -> None:
                nonlocal began
                now = time.perf_counter()
                seconds[what], began = round(now - began, 3), now

            snapshot = policy.snapshot()
            done("copy")
            digest = snapshot.sha256
            done("digest")
            written = snapshot.save(scratch / str(number), dtype="bfloat16", before=before)
            done("write")
            Versions(run).publish(
                Version(number, 1), step=number, folder=scratch / str(number), weights_sha256=digest,
                changed_share=written.changed_share, sha256s=written.sha256s,
            )  # fmt: skip
            done("store")
            Versions(run).load(Version(number, 1))
            done("verify")
            found.append(seconds)
            before = scratch / str(number)
            with torch.no_grad():
                for it in policy.model.parameters():
                    it.mul_(1.01)
        files = [path.stat().st_size for path in (scratch / "1").iterdir()]
        return {"gigabytes": round(sum(files) / 1e9, 2), "files": len(files), "seconds": found}


if __name__ == "__main__":
    stage.run("versions", __doc__, measure)
