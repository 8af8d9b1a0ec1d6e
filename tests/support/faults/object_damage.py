"""Kinds of damage to the objects of a run."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from storage import layout
from tba.types import Version
from tests.support.storage.synthetic import EVERY, B, K, S

HOLDING: dict[str, tuple[str, dict[str, int]]] = {
    layout.sync(2): (layout.sync(3), {"syncs": 1}),
    layout.attempt(2): (layout.attempt(1), {"attempts": 1}),
    layout.evaluation(Version(2, 1)): (layout.evaluation(Version(4, 2)), {"evaluations": 4, "examples": 1}),
    layout.retention(1): (layout.retention(2), {"versions": 1}),
    layout.event("trainer", 2, 0): ("", {"events": 1}),
    layout.version(Version(2, 1)) + layout.MANIFEST: (layout.version(Version(4, 2)) + layout.MANIFEST, {"versions": 1}),
    layout.checkpoint(Version(2, 1)) + layout.MANIFEST: (
        layout.checkpoint(Version(4, 2)) + layout.MANIFEST,
        {"checkpoints": 1},
    ),
    layout.steps(2, 1): (layout.steps(1, 1), {"steps": EVERY, "steps_all": EVERY}),
    layout.draws(2, 1): (layout.draws(1, 1), {"draws": EVERY * B * K, "draws_all": EVERY * B * K}),
    layout.prompts("test"): ("", {"prompts": 1}),
    layout.shard(0, 1): (layout.shard(1, 2), {"trajectories": 2 * S, "selection": 2 * S, "groups": 2}),
    layout.shard(0, 6): ("", {"trajectories": 2 * S, "selection": 2 * S, "groups": 2}),
}
"""One object of each kind, another object of that kind, and the number of rows of each view in the first."""
MAY_BE_GONE = {
    layout.evaluation(Version(2, 1)), layout.event("trainer", 2, 0), layout.shard(0, 6),
    layout.version(Version(2, 1)) + layout.MANIFEST, layout.checkpoint(Version(2, 1)) + layout.MANIFEST,
}  # fmt: skip
"""Objects that no other object in the run names, so that their removal is not noticed."""
DAMAGES: dict[str, Callable[[Path, Path | None], Any]] = {
    "cut": lambda path, _: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "emptied": lambda path, _: path.write_bytes(b""),
    "a list": lambda path, _: path.write_bytes(b"[1, 2]"),
    "a number": lambda path, _: path.write_bytes(b"7"),
    "of no text": lambda path, _: path.write_bytes(b"\xff\xfe\x00" * 40),
    "another": lambda path, other: other and shutil.copyfile(other, path),
    "removed": lambda path, _: path.unlink(),
}


def flip(path: Path, place: int) -> None:
    """Change one bit, but no size or time that a listing shows."""
    about, data = path.stat(), bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
