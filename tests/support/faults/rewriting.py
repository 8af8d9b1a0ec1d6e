"""Changes records of a run so that all digests are correct, as a person who knows the format could."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from storage import layout
from storage.objects import records
from storage.objects.digests import Digest
from storage.runs.run import Run


def with_digest(record: Any) -> bytes:
    """Return a record as its writer would store it."""
    return records.encode(record)


def rewrite(path: Path, **changes: Any) -> None:
    """Change fields of a record."""
    path.write_bytes(with_digest({**json.loads(path.read_bytes()), **changes}))


def replace_text(path: Path, old: str, new: str) -> None:
    """Change a record's text."""
    path.write_bytes(with_digest(json.loads(path.read_text().replace(old, new))))


def describe_again(run: Run, key: str) -> None:
    """Correct the digest of a changed object of the ledger or of prompts in its record, and the digests in the records
    that follow."""
    digest = Digest.of(run.store.read(key)).encode()
    if split := layout.parse_prompts(key):
        rewrite(Path(run.url, layout.prompts_record(split)), **digest)
        return
    name = layout.parse_ledger(key)
    assert name
    rewrite(Path(run.url, layout.ledger(*name)), **{key.split("/")[0]: digest})
    link_again(run, layout.LEDGER, ("sync", "attempt"))


def link_again(run: Run, folder: str, named_by: tuple[str, ...]) -> None:
    """Make every record under a folder name the current hash of the record before it, in the order of their names."""
    for path in sorted(Path(run.url, folder).rglob("*.json")):
        previous = json.loads(path.read_bytes()).get("previous")
        if not previous:
            continue
        number, attempt = (previous[name] for name in named_by)
        before = path.parent / f"{number:06d}-a{attempt:04d}.json"
        rewrite(path, previous={**previous, "sha256": sha256(before.read_bytes()).hexdigest()})
