"""A stored run as a later version of the program might have written it: with additions to everything, in the same
version of the format. What it adds is what docs/storage.md says may be added."""

import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors.torch import load_file, save_file

from storage import layout
from storage.log import schema
from storage.objects import parquet, records
from storage.objects.digests import Digest
from tests.support.faults.rewriting import with_digest

ADDED = {"added_later": {"numbers": [1, 2.5], "text": "x", "nothing": None}}
FREE = ("config", "data", "queues", "progress")
"""Parts of records whose keys are names of things, not fields."""


def add_to_everything(root: Path, names: list[str]) -> None:
    """`names` are runs, a fork after its parent."""
    hashes: dict[str, str] = {}  # of the newest sync records, by key
    shards: dict[str, dict[str, Any]] = {}  # what is said of a shard, by key
    for name in names:
        run = root / "runs" / name
        for path in sorted(run.glob("trajectories/*/*.parquet")):
            if path.read_bytes()[-4:] == b"PAR1":
                data = schema.encode(_with_columns(schema.decode(path.read_bytes())))
                path.write_bytes(data)
                shards[path.relative_to(run).as_posix()] = {"bytes": len(data), "sha256": sha256(data).hexdigest()}
        for path in (*run.glob("draws/*"), *run.glob("steps/*"), *run.glob("prompts/*.parquet")):
            path.write_bytes(parquet.encode(_with_columns(parquet.decode(path.read_bytes(), path.name))))
        for path in (*run.glob("ledger/*"), *run.glob("prompts/*.json")):
            _describe_again(run, path)
        for path in sorted(run.glob("syncs/*")):
            _sync(path, shards, hashes)
        for path in sorted(run.glob("*/*/MANIFEST.json")):
            _folder(path.parent)
        for path in _records(run):
            write(path, added(json.loads(path.read_text())))
        _link_again(root / "runs", run)
        (run / "added").mkdir()
        (run / "added" / "later.json").write_text("{}")


def write(path: Path, record: Any) -> None:
    """With a digest that fits, where there was one."""
    path.write_bytes(with_digest(record) if records.DIGEST in record else json.dumps(record).encode())


def _describe_again(run: Path, path: Path) -> None:
    """A record of objects that are others now."""
    record = json.loads(path.read_bytes())
    for folder in ("draws", "steps"):
        if folder in record:
            record[folder] |= Digest.of((run / folder / path.name).with_suffix(".parquet").read_bytes()).encode()
    if "split" in record:
        record |= Digest.of(path.with_suffix(".parquet").read_bytes()).encode()
    write(path, added(record))


def _link_again(runs: Path, run: Path) -> None:
    """Each record names the one before it, perhaps one of the parent's, by what that holds now."""
    for path in sorted(run.rglob("*.json")):
        record = json.loads(path.read_bytes())
        before = _before(path, record)
        if before is None:
            continue
        while not before.exists():
            parent = json.loads((before.parents[1] / layout.RUN).read_bytes())["parent"]["run"]
            before = runs / parent / before.relative_to(before.parents[1])
        digest = sha256(before.read_bytes()).hexdigest()
        if "previous" in record:
            record["previous"]["sha256"] = digest
        else:
            record["previous_sha256"] = digest
        write(path, record)


def _before(path: Path, record: Any) -> Path | None:
    """The record that one names, but for sync records, which are linked as they are written."""
    folder = path.parent.name
    if folder in ("attempts", "retention") and record.get("previous_sha256"):
        return path.with_name(f"{int(path.stem) - 1:0{len(path.stem)}d}.json")
    if not (previous := record.get("previous")):
        return None
    if folder in ("ledger", "evaluations"):
        number = previous["sync" if folder == "ledger" else "version"]
        return path.with_name(f"{number:06d}-a{previous['attempt']:04d}.json")
    return path.with_name(f"{record['life']:04d}-{previous['seq']:06d}.json")


def added(record: Any) -> Any:
    """Fields that nobody knows, in every object."""
    if isinstance(record, list):
        return [added(item) for item in record]
    if not isinstance(record, dict):
        return record
    return {**{key: value if key in FREE else added(value) for key, value in record.items()}, **ADDED}


def _records(run: Path) -> Iterator[Path]:
    yield run / layout.RUN
    for folder in ("attempts", "control", "evaluations", "events", "forks", "retention"):
        yield from (run / folder).rglob("*.json")


def _with_columns(table: pa.Table) -> pa.Table:
    """Before and after what was there, one that is no number and one that is."""
    rows = len(table)
    table = table.add_column(0, "added_text", pa.array(["x"] * rows))
    table = table.append_column("added_list", pa.array([[1.0, None]] * rows)).append_column(
        "added_number", pa.array([7] * rows, pa.int64())
    )
    return table.replace_schema_metadata({**(table.schema.metadata or {}), b"added_later": b"x"})


def _sync(path: Path, shards: dict[str, dict[str, Any]], hashes: dict[str, str]) -> None:
    record = json.loads(path.read_text())
    record["shards"] = [{**shard, **shards[shard["key"]]} for shard in record["shards"]]
    record["previous_sha256"] = hashes.get(layout.sync(record["sync"] - 1)) if record["sync"] else None
    write(path, added(record))
    hashes[layout.sync(record["sync"])] = sha256(path.read_bytes()).hexdigest()


def _folder(folder: Path) -> None:
    """A version or a checkpoint: one more file, and more in those of the trainer's state."""
    (folder / "added.bin").write_bytes(b"later")
    if (state := folder / "state.json").exists():
        state.write_text(json.dumps({**json.loads(state.read_text()), **ADDED}))
        tensors = load_file(folder / "optimizer.safetensors")
        save_file({**tensors, "added.0": torch.ones(2)}, folder / "optimizer.safetensors", {"added": "later"})
    manifest = json.loads((folder / layout.MANIFEST).read_text())
    names = sorted([*(file["name"] for file in manifest["files"]), "added.bin"])
    files = [(name, (folder / name).read_bytes()) for name in names]
    manifest["files"] = [{"name": n, "bytes": len(data), "sha256": sha256(data).hexdigest()} for n, data in files]
    manifest["sha256"] = sha256("".join(f"{f['sha256']} {f['name']}\n" for f in manifest["files"]).encode()).hexdigest()
    write(folder / layout.MANIFEST, added(manifest))
