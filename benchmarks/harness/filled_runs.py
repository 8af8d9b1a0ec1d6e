"""Make runs with many shards quickly: the same trajectories, stored again and again under different ids."""

import json
import os
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path

import numpy as np
import pyarrow as pa

from storage import layout
from storage.log.schema import encode, expected_metadata, to_table, trajectory_ids
from storage.log.sync_records import Shard, SyncRecord
from storage.log.sync_records import encode as encode_record
from storage.maintenance.compactor import compact
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.checkpoints import Checkpoints
from tba.types import Trajectory, Version

SEARCHERS = 8
ADMITTED = 20  # shards per record


def make_round(*, prompts: int = 32, responses: int = 16, tokens: int = 230, searcher: int = 0) -> list[Trajectory]:
    """Return a round whose tokens are as frequent as words in a language. Responses have 0.5 to 1.5 times `tokens`
    tokens."""
    random, now = np.random.default_rng(searcher), datetime.now(UTC)
    made: list[Trajectory] = []
    for prompt in range(prompts):
        asked = words(random, 90)
        for slot in range(prompt * responses, (prompt + 1) * responses):
            answered = words(random, int(random.integers(tokens // 2, tokens * 3 // 2)))
            logps = -random.exponential(0.5, len(answered)).astype(np.float32)
            ref_logps = logps + random.normal(0, 0.05, len(answered)).astype(np.float32)
            made.append(
                Trajectory(
                    searcher=searcher, round=0, slot=slot, version_start=Version(3, 1), version_end=Version(3, 1),
                    prompt_id=f"train/{prompt}", group_id=f"{searcher}/0/train/{prompt}",
                    prompt=text(asked), response=text(answered), prompt_tokens=asked, response_tokens=answered,
                    behaviour_logps=tuple(logps.tolist()), ref_logps=tuple(ref_logps.tolist()),
                    reference_version=Version(0, 1), reward=float(random.random() < 0.5),
                    reward_parts={"correct": 1.0}, finished=True, temperature=0.7, top_p=1.0,
                    seed=int(random.integers(2**62)), created_at=now, generate_seconds=0.01,
                )
            )  # fmt: skip
    return made


def words(random: np.random.Generator, number: int) -> tuple[int, ...]:
    return tuple(random.zipf(1.3, number).clip(1, 31_999).tolist())


def text(tokens: Sequence[int]) -> str:
    return " ".join(f"w{token % 5000}" for token in tokens)


def make_run(work: Path, name: str) -> Run:
    return Run.create(str(work), name, config={}, sampler_sql="", code_version="benchmark")


def filled(work: Path, name: str, rows: Sequence[Trajectory], size: int) -> tuple[Run, list[Shard]]:
    """Return a run with `size` shards, with the same trajectories under different ids. They are not flushed one by
    one."""
    run, shards = make_run(work, name), []
    table = to_table(rows, run=run.name, searcher=0, seq=0)
    for number in range(size):
        searcher, seq = number % SEARCHERS, number // SEARCHERS
        key, data = layout.shard(searcher, seq), encode(renamed(table, run.name, searcher, seq))
        path = Path(run.url) / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        digest = sha256(data).hexdigest()
        shards.append(Shard(key=key, searcher=searcher, seq=seq, rows=len(table), bytes=len(data), sha256=digest))
    (Path(run.url) / "shards.json").write_text(json.dumps([vars(shard) for shard in shards]))
    os.sync()
    return run, shards


def compacted(run: Run, shards: Sequence[Shard]) -> tuple[Run, Sequence[Shard]]:
    """Compact these shards of a run, and return both."""
    previous, newest = None, len(shards) // ADMITTED
    for sync in range(newest + 1):
        admitted = shards[sync * ADMITTED : (sync + 1) * ADMITTED]
        record = SyncRecord(
            sync=sync, step=sync, attempt=1, shards=admitted, rows=sum(it.rows for it in admitted),
            previous_sha256=previous, refused=[], created_at="",
        )  # fmt: skip
        run.store.create(layout.sync(sync), data := encode_record(record))
        previous = sha256(data).hexdigest()
    claim_attempt(run)
    for key in (layout.draws(newest, 1), layout.steps(newest, 1)):  # without them there is no checkpoint
        run.store.create(key, b"")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "weights").write_bytes(b"none")
        Checkpoints(run).save(newest, 1, newest, Path(folder))
    compact(run, keep_checkpoints=1)
    return run, shards


def renamed(table: pa.Table, run: str, searcher: int, seq: int) -> pa.Table:
    ids, searchers = trajectory_ids(searcher, seq, len(table)), [searcher] * len(table)
    named = table.set_column(0, "trajectory_id", pa.array(ids)).set_column(
        1, "searcher", pa.array(searchers, pa.int32())
    )
    return named.replace_schema_metadata(expected_metadata(run, searcher, seq))


def forget_files(run: Run, shards: Sequence[Shard]) -> None:
    """Drop the files of shards from the page cache, so that they are read from the disk again."""
    files = [Path(run.url) / shard.key for shard in shards]
    files += Path(run.url).glob(f"{layout.COMPACTIONS}*.parquet")
    for file in files:
        if not file.exists():  # the shard is in a compaction
            continue
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
