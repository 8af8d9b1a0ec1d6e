"""Kinds of damage to the files of a checkpoint, each with a part of the error about it."""

import json
from collections.abc import Callable
from typing import Any

from storage import layout
from storage.objects.store import Store
from storage.runs.run import Run
from tba.types import Version
from tests.support.faults.rewriting import with_digest

MANIFEST, OPTIMIZER, MODEL, TOKENIZER, STATE = (
    layout.MANIFEST, "optimizer.safetensors", "model.safetensors", "tokenizer.json", "state.json",
)  # fmt: skip


def put(store: Store, key: str, data: bytes) -> None:
    store.delete(key)
    store.create(key, data)


def flip(store: Store, key: str) -> None:
    """Change one bit in the middle."""
    data = bytearray(store.read(key))
    data[len(data) // 2] ^= 1
    put(store, key, bytes(data))


def truncate(store: Store, key: str) -> None:
    data = store.read(key)
    put(store, key, data[: len(data) // 2])


def say_another_step(store: Store, key: str) -> None:
    manifest = json.loads(store.read(key))
    put(store, key, with_digest({**manifest, "step": manifest["step"] + 1}))


def say_another_sync(store: Store, key: str) -> None:
    manifest = json.loads(store.read(key))
    put(store, key, with_digest({**manifest, "sync": manifest["sync"] + 1}))


def damage(run: Run, checkpoint: Version, how: str = "flipped optimizer") -> None:
    name, change, _ = DAMAGES[how]
    change(run.own, layout.checkpoint(checkpoint) + name)


DAMAGES: dict[str, tuple[str, Callable[[Store, str], Any], str]] = {
    "flipped optimizer": (OPTIMIZER, flip, "sha256 differs"),
    "flipped model": (MODEL, flip, "sha256 differs"),
    "truncated optimizer": (OPTIMIZER, truncate, "its manifest says"),
    "no tokenizer": (TOKENIZER, lambda store, key: store.delete(key), "is gone, but its manifest names it"),
    "flipped state": (STATE, flip, "sha256 differs"),
    "truncated manifest": (MANIFEST, truncate, "is not JSON"),
    "manifest that is a list": (MANIFEST, lambda store, key: put(store, key, b"[]"), "is not a record but a list"),
    "manifest of another step": (MANIFEST, say_another_step, "says step"),
    "manifest of another sync": (MANIFEST, say_another_sync, "says that this is checkpoint"),
    "manifest that leads outside": (
        MANIFEST,
        lambda store, key: put(
            store, key, with_digest(json.loads(store.read(key).replace(b'"state.json"', b'"../state.json"')))
        ),
        "names not a key",
    ),
}
"""By name: the file, the change, and a part of the error."""
