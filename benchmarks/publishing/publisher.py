"""Publishes versions stage by stage, for measurements."""

import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.models.policy import Policy
from tba.types import Version

SETTLED = 2.5  # seconds after which a file counts as unchanged; a large version takes longer to write
Stage = Callable[[str], AbstractContextManager[None]]
"""Returns the context in which the stage of this name runs."""


class Publisher:
    """Publishes versions as a trainer does, and verifies them as searchers do."""

    def __init__(self, run: Run, scratch: Path):
        self.run, self.scratch, self.before = run, scratch, None

    def publish(self, policy: Policy, number: int, stage: Stage) -> None:
        folder, version, versions = self.scratch / str(number), Version(number, 1), Versions(self.run)
        with stage("copy"):
            snapshot = policy.snapshot()
        with stage("digest"):
            digest = snapshot.sha256
        with stage("write"):
            written = snapshot.save(folder, dtype="bfloat16", before=self.before)
        with stage("store"):
            versions.publish(
                version,
                step=number,
                folder=folder,
                weights_sha256=digest,
                changed_share=written.changed_share,
                sha256s=written.sha256s,
            )
        time.sleep(SETTLED)
        for name in ("verify", "again"):
            with stage(name):
                versions.load(version)
        if self.before:
            shutil.rmtree(self.before)
        versions.prune(keep=1, every=10**9)
        self.before = folder
