"""The prompts of a run, tokenised once. Each split is one object, with a record that holds its digest. Both are written
before anything is generated."""

import json
from collections.abc import Sequence
from contextlib import suppress

import pyarrow as pa

from storage import layout
from storage.objects import parquet, records
from storage.objects.digests import Digest
from storage.runs.run import Run
from tba.errors import AlreadyExists, DataError, Missing
from tba.types import Prompt

PROMPTS_SCHEMA = pa.schema(
    {
        "prompt_id": pa.string(),
        "text": pa.string(),
        "tokens": pa.list_(pa.field("element", pa.int32())),
        "answer": pa.string(),
        "metadata": pa.string(),  # JSON
    }
)


def write_prompts(run: Run, split: str, prompts: Sequence[Prompt]) -> None:
    """Store the prompts of a split, then its record. Do nothing if the same prompts are stored already. Raise DataError
    if other prompts are stored, or if two prompts have the same id."""
    ids = [prompt.prompt_id for prompt in prompts]
    if len(set(ids)) < len(ids):
        twice = next(prompt_id for prompt_id in ids if ids.count(prompt_id) > 1)
        raise DataError(f"split {split!r}: prompt_id {twice!r} occurs more than once")
    key, table = layout.prompts(split), _table(prompts)
    data = parquet.encode(table)
    try:
        run.store.create(key, data)
    except AlreadyExists:
        if _read(run, split) != table:
            raise DataError(
                f"{run.url}/{key} holds other prompts than the task makes now: the task's data has changed; "
                "start a new run"
            ) from None
        data = run.store.read(key)
    record = {"split": split, "prompts": len(prompts), **Digest.of(data).encode(), "created_at": records.now()}
    with suppress(AlreadyExists):
        run.store.create(layout.prompts_record(split), records.encode(record))


def has_prompts(run: Run, split: str) -> bool:
    return run.store.exists(layout.prompts(split))


def read_prompts(run: Run, split: str) -> list[Prompt]:
    """Return the prompts of a split, in the order in which the task made them. Raise Missing if they are not stored,
    and Damaged if they do not match their record."""
    rows = _read(run, split).to_pylist()
    with records.reading(f"{run.url}/{layout.prompts(split)}"):
        return [
            Prompt(
                prompt_id=row["prompt_id"],
                text=row["text"],
                tokens=tuple(row["tokens"]),
                answer=row["answer"],
                metadata=json.loads(row["metadata"]),
            )
            for row in rows
        ]


def _read(run: Run, split: str) -> pa.Table:
    key = layout.prompts(split)
    try:
        data = run.store.read(key)
    except Missing:
        raise Missing(f"{run.url}/{key}: the run has no prompts of split {split!r} yet") from None
    if digest := read_digest(run, split):
        digest.verify(data, f"{run.url}/{key}")
    return parquet.decode(data, f"{run.url}/{key}", PROMPTS_SCHEMA)


def read_digest(run: Run, split: str) -> Digest | None:
    """Return the digest of a split's prompts from the split's record; None if the split has no record, as in older
    runs."""
    key = layout.prompts_record(split)
    try:
        record = records.read(run.store, key, "split", "bytes", "sha256")
    except Missing:
        return None
    with records.reading(f"{run.url}/{key}"):
        return Digest.decode(record)


def _table(prompts: Sequence[Prompt]) -> pa.Table:
    rows = [
        {
            "prompt_id": prompt.prompt_id,
            "text": prompt.text,
            "tokens": list(prompt.tokens),
            "answer": prompt.answer,
            "metadata": json.dumps(dict(prompt.metadata), ensure_ascii=False),
        }
        for prompt in prompts
    ]
    return pa.Table.from_pylist(rows, schema=PROMPTS_SCHEMA)
