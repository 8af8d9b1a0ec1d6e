"""Changes a stored run as if a later version of the program had written it, with the same version of the format. The
additions to all objects are those that docs/storage.md allows."""

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
"""Parts of records whose keys are data, not names of fields."""


def add_to_everything(root: Path, names: list[str]) -> None:
    """Add something to every object of the runs `names`, in which a fork comes after its parent."""
    hashes: dict[str, str] = {}  # hashes of the rewritten sync records, by key
    shards: dict[str, dict[str, Any]] = {}  # new size and hash of each shard, by key
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
    """Write a record, with a correct digest if it had one."""
    path.write_bytes(with_digest(record) if records.DIGEST in record else json.dumps(record).encode())


def _describe_again(run: Path, path: Path) -> None:
    """Correct the digests in a record of changed objects."""
    record = json.loads(path.read_bytes())
    for folder in ("draws", "steps"):
        if folder in record:
            record[folder] |= Digest.of((run / folder / path.name).with_suffix(".parquet").read_bytes()).encode()
    if "split" in record:
        record |= Digest.of(path.with_suffix(".parquet").read_bytes()).encode()
    write(path, added(record))


def _link_again(runs: Path, run: Path) -> None:
    """Make each record name the current hash of the record before it, which may belong to the parent."""
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
    """Return the path of the previous record that a record names. Sync records are linked elsewhere, as they are
    written."""
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
    """Return a record with unknown fields in every JSON object."""
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
    """Add unknown columns before and after the others: a text, a list and a number."""
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
    """Add a file to a version or checkpoint, and fields and a tensor to the files of the trainer's state."""
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
