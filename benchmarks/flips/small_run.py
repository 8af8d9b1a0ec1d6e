"""Makes a small run with an object of every kind and a fork of the run, and asks for everything that a run answers.

There is no model: weights are random bytes.

The run `whole` takes ten steps with a sync every two steps. Its first trainer dies after sync 3, whose ledger is
abandoned. The second trainer continues from the checkpoint of sync 2 and publishes versions as differences from its
first one. After sync 4, old versions and a checkpoint are given up, and a compaction takes in the shards and gives up
the tokens of rows that cannot be drawn any more. Sync 5 admits shards that stay objects of their own, among them one of
an imported file. Some shards still wait at the end, and one was refused. The run `fork` leaves `whole` after step 8 and
takes two steps of its own.
"""

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

import storage
from flows.commands.fork import fork
from flows.roles.buffer_process import make_buffer
from storage import layout
from storage.buffer.replay_buffer import DuckReplayBuffer
from storage.buffer.sampler import default_sampler
from storage.local_files.scratch import scratch_folder
from storage.log.ledger import ParquetLedger
from storage.log.prompts import write_prompts
from storage.log.sync_records import read_chain
from storage.log.trajectories import Trajectories
from storage.maintenance.compactor import compact
from storage.objects import manifest_folders
from storage.objects.open_store import open_store
from storage.objects.store import Store
from storage.runs import forks, retention
from storage.runs.attempts import chain, newest_attempt
from storage.runs.control import change_state, read_state
from storage.runs.events import Events
from storage.runs.held_lease import HeldLease
from storage.runs.leases import read_leases
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.checkpoints import Checkpoints
from storage.weights.evaluations import Evaluations
from storage.weights.versions import Versions
from tba.config import parse
from tba.errors import TBAError
from tba.fetched import Lists
from tba.presets import preset
from tba.types import Base, Draw, Outcome, Prompt, Score, StepRecord, Trajectory, Version

EVERY = 2
SEARCHERS = 2
SETTINGS = {
    "training.steps": 10,
    "training.prompts_per_step": 2,
    "training.responses_per_prompt": 2,
    "training.groups_per_micro_batch": 2,
    "search.searchers": SEARCHERS,
    "search.responses_per_prompt": 3,
    "search.prompts_per_round": 2,
    "search.initial_fill": 12,
    "sampling.capacity": 2,
    "sync.every": EVERY,
    "sync.checkpoint_every": 2,
    "evaluation.every": 2,
    "limits.store_deadline": 10,
}
PROMPTS = [f"train/{number}" for number in range(6)]
IMPORTED = layout.imported("5e" * 32)
WEIGHTS = 4000  # bytes of a version
AGGREGATED = ("groups", "difficulty", "selection")
"""Views whose sums of floats depend in their last digits on the order of the rows."""


def make_runs(root: str) -> list[str]:
    """Make both runs under a root, and return their names."""
    config = preset("quickstart").replace(SETTINGS)
    run = Run.create(
        root, "whole", config=config.to_dict(), sampler_sql=default_sampler(), code_version="0", created_by="benchmark"
    )
    change_state(run, desired="run", searchers=SEARCHERS, why="started")
    write_prompts(run, "train", [_prompt(prompt_id) for prompt_id in PROMPTS])
    write_prompts(run, "test", [_prompt("test/0"), _prompt("test/1")])
    first = _Trainer(run)
    first.search(version=Version(0, 1))
    run.store.create(layout.shard(7, 0), b"PAR1 and no more")  # the first record refuses it
    queues = first.take_syncs(range(1, 4))
    second = _Trainer(run)
    second.rejoin(2, queues[2])
    second.take_syncs(range(3, 5))
    Versions(run).prune(keep=2, every=100)
    Checkpoints(run).prune(keep=1)
    compact(run, keep_checkpoints=1, drop_beyond=config.sampling.eligibility)
    _append(run, IMPORTED, 0, Version(4, 2), second.chance)
    Events(run, "import", 1).write("imported", "answers.jsonl: 4 responses", file="answers.jsonl", rows=4)
    forked = fork(run, 4 * EVERY, {}, name="fork")
    third = _Trainer(forked)
    third.rejoin(4, None)
    for trainer in (second, third):
        trainer.take_syncs([5])
        trainer.search(version=Version(5, trainer.attempt))
        _finish(trainer)
    return [run.name, forked.name]


def copy_runs(root: str, to: str, names: Sequence[str]) -> None:
    """Copy runs, object by object, to a root on any store."""
    for name in names:
        whole, copy = (open_store(layout.run_url(each, name)) for each in (root, to))
        for entry in whole.list():
            put(copy, entry.key, whole.read(entry.key))


def put(store: Store, key: str, data: bytes | None) -> None:
    """Store an object under a key, in place of any object that has the key. None removes the object."""
    path = store.local_path(key)
    if data is None:
        store.delete(key)
    elif path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    else:
        with scratch_folder() as scratch:
            (scratch / "object").write_bytes(data)
            store.upload(scratch / "object", key)


class _Trainer:
    """One life of the trainer, with searchers in step with it. It begins with publishing a version."""

    def __init__(self, run: Run):
        self.run, self.config = run, parse(run.config)
        claimed = claim_attempt(run)
        self.attempt = claimed.number
        self.chance = random.Random(self.attempt)
        self.first = Version(claimed.continues.number if claimed.continues else 0, self.attempt)
        self.events = Events(run, "trainer", self.attempt, logs=False)
        self.events.write("started", f"attempt {self.attempt}", attempt=self.attempt)
        self.buffer: DuckReplayBuffer = make_buffer(run, self.config, self.attempt, self.events)
        self.publish(self.first)

    def rejoin(self, sync: int, queues: Mapping | None) -> None:
        """Apply the records up to a sync, then restore the prompt queues of the checkpoint, if given."""
        self.buffer.replay(sync)
        if queues:
            self.buffer.restore(queues)

    def search(self, *, version: Version) -> None:
        log = Trajectories(self.run)
        for searcher in range(SEARCHERS):
            _append(self.run, searcher, log.next_seq(searcher), version, self.chance)

    def take_syncs(self, syncs: Sequence[int]) -> dict[int, Mapping]:
        """Take the steps before each sync and store their results. Return the prompt queues by sync."""
        queues: dict[int, Mapping] = {}
        if syncs[0] == 1:
            self.buffer.sync(0, step=0)
        for sync in syncs:
            steps = range((sync - 1) * EVERY + 1, sync * EVERY + 1)
            records = [_step(step, sync, self.buffer.draw(step), self.attempt, self.chance) for step in steps]
            self.search(version=self.first if sync == self.first.number + 1 else Version(sync - 1, self.attempt))
            self.buffer.sync(sync, step=sync * EVERY)
            queues[sync] = self.buffer.queues()
            ParquetLedger(self.run, self.attempt).write(sync, records, weights_sha256=f"{sync:064x}")
            self.publish(Version(sync, self.attempt))
            if sync % 2 == 0:
                _evaluate(self.run, Version(sync, self.attempt), self.chance)
                with tempfile.TemporaryDirectory() as folder:
                    _write_weights(Path(folder), Version(sync, self.attempt))
                    Path(folder, "state.json").write_text(f'{{"sync": {sync}}}\n')
                    Checkpoints(self.run).save(sync, self.attempt, sync * EVERY, Path(folder))
        return queues

    def publish(self, version: Version) -> None:
        """Publish a version: the first one of this life whole, every other as its difference from the first."""
        with tempfile.TemporaryDirectory() as name, tempfile.TemporaryDirectory() as of_first:
            _write_weights(Path(name), version)
            _write_weights(Path(of_first), self.first)
            Versions(self.run).publish(
                version,
                step=version.number * EVERY,
                folder=Path(name),
                weights_sha256=f"{version.number:064x}",
                changed_share=0.01,
                base=Base(self.first, Path(of_first)) if version != self.first else None,
            )


def _finish(trainer: _Trainer) -> None:
    """Write what roles leave behind when a run ends: events, an alarm that is over, and leases."""
    run, version = trainer.run, str(Version(5, trainer.attempt))
    searcher = Events(run, "searcher-000", 1, logs=False)
    searcher.write("slow", "a round took 9 s", severity="warning", alarm="began", of="rounds")
    searcher.write("slow", "a round took 1 s", alarm="over", of="rounds")
    searcher.write("stopped", f"after version {version}", version=version)
    with ExitStack() as stack:
        for role in ("trainer", "searcher-000", "evaluator"):
            lease = stack.enter_context(HeldLease(run, role, every=60.0))
            lease.tell("finished", step=10.0, version=5.0)
    change_state(run, desired="stop", why="finished")


def _append(run: Run, searcher: int, seq: int, version: Version, chance: random.Random) -> None:
    """Store one round of a searcher: three responses to each of two prompts."""
    asked = [PROMPTS[(2 * seq + searcher + number) % len(PROMPTS)] for number in range(2)]
    rows = [_trajectory(prompt_id, searcher, seq, slot, version, chance) for slot, prompt_id in enumerate(asked * 3)]
    Trajectories(run).append(searcher, seq, rows)


def _trajectory(
    prompt_id: str, searcher: int, seq: int, slot: int, version: Version, chance: random.Random
) -> Trajectory:
    tokens = tuple(chance.randrange(3, 90) for _ in range(4))
    reward = round(chance.random(), 3)
    return Trajectory(
        searcher=searcher,
        round=seq,
        slot=slot,
        version_start=version,
        version_end=version,
        prompt_id=prompt_id,
        group_id=f"{searcher}/{seq}/{prompt_id}",
        prompt="1+2=",
        response=" ".join(map(str, tokens)),
        prompt_tokens=(1, 5, 2, 6),
        response_tokens=tokens,
        behaviour_logps=tuple(-chance.random() for _ in tokens),
        ref_logps=tuple(-chance.random() for _ in tokens),
        loss_mask=(True, False, True, True) if seq % 2 else None,
        step_ends=(1, 4) if seq % 3 else None,
        step_values=(0.25, 0.5) if seq % 3 else None,
        reference_version=Version(0, 1),
        reward=reward,
        reward_parts={"correct": reward},
        finished=slot % 2 == 0,
        temperature=0.7,
        top_p=1.0,
        seed=chance.getrandbits(62),
        created_at=datetime(2026, 1, 2, 12, 0, slot, tzinfo=UTC),
        generate_seconds=round(chance.random(), 4),
    )


def _step(step: int, sync: int, draws: Sequence[Draw], attempt: int, chance: random.Random) -> StepRecord:
    outcomes = [
        Outcome(
            slot=draw.slot,
            position=draw.position,
            advantage=chance.gauss(0, 1),
            residual=chance.gauss(0, 1),
            log_z=chance.random(),
            logp=-chance.random(),
            ref_logp=-chance.random(),
        )
        for draw in draws
    ]
    names = ("loss", "grad_norm", "lr", "beta", "reward_mean", "age_mean", "tokens", "seconds_step", "seconds_wait")
    return StepRecord(
        step=step,
        sync=sync,
        version=Version(sync - 1, attempt),
        draws=draws,
        outcomes=outcomes,
        metrics={name: chance.random() for name in names},
    )


def _evaluate(run: Run, version: Version, chance: random.Random) -> None:
    Evaluations(run).write(
        [
            Score(
                version=version, step=version.number * EVERY, metric=metric, value=chance.random(), n=100, seconds=2.5
            )
            for metric in ("greedy", "sampled")
        ]
    )


def _prompt(prompt_id: str) -> Prompt:
    return Prompt(prompt_id=prompt_id, text="1+2=", tokens=(1, 5, 2, 6), answer="3", metadata={"digits": 1})


def _write_weights(folder: Path, version: Version) -> None:
    """Write the files of a version. Versions of one attempt differ in a few bytes, so their differences are small."""
    weights = bytearray(random.Random(version.attempt).randbytes(WEIGHTS))
    for place in range(version.number):
        weights[place * 100] ^= 1 + version.number
    Path(folder, "model.safetensors").write_bytes(weights)
    Path(folder, "config.json").write_text('{"hidden_size": 8, "num_hidden_layers": 1}\n')


# --- the answers of a run ---------------------------------------------------------------------------------------------


def answers(run: Run) -> dict[str, str]:
    """Return everything that a run answers, by name: the digest of each answer, or the error instead of it."""
    config = _answer(lambda: parse(run.config).to_dict())
    asked: dict[str, Callable[[], Any]] = {
        "run": lambda: (run, run.config, run.sampler_sql, run.parent),
        "state": lambda: read_state(run),
        "leases": lambda: read_leases(run),
        "attempts": lambda: (newest_attempt(run), chain(run)),
        "forks": lambda: (forks.names(run), forks.pinned_checkpoints(run), forks.newest_pinned_record(run)),
        "given up": lambda: [sorted(names) for names in vars(retention.given_up(run)).values()],
        "payloads given up": lambda: retention.given_up_payloads(run),
        "draws of the buffer": lambda: _drawn(run),
        **{
            f"{prefix}{name}": lambda prefix=prefix, name=name: _files(run, prefix, name)
            for prefix in (layout.VERSIONS, layout.CHECKPOINTS)
            for name in map(str, manifest_folders.complete(run.store, prefix))
        },
    }
    return {"config": config, **{name: _answer(ask) for name, ask in asked.items()}, **_views(run)}


def _answer(ask: Callable[[], Any]) -> str:
    try:
        return sha256(repr(ask()).encode(errors="backslashreplace")).hexdigest()
    except (TBAError, duckdb.Error) as error:
        return f"error: {str(error).splitlines()[0]}"


def _views(run: Run) -> dict[str, str]:
    try:
        con = storage.connect(run)
    except (TBAError, duckdb.Error) as error:
        return {"views": f"error: {str(error).splitlines()[0]}"}
    with con:
        names = [name for (name,) in con.execute("show tables").fetchall()]
        return {f"view {name}": _answer(lambda name=name: _rows(con, name)) for name in names}


def _rows(con: duckdb.DuckDBPyConnection, view: str) -> tuple:
    rows = con.execute(f"from {view} order by all").fetchall()
    if view in AGGREGATED:
        rows = [tuple(round(value, 9) if isinstance(value, float) else value for value in row) for row in rows]
    return con.description, rows


def _files(run: Run, prefix: str, name: str) -> list[Any]:
    """Return the digests of the files of a version or checkpoint, and for a version what the version store says about
    it."""
    with scratch_folder() as scratch:
        manifest_folders.fetch(run.store, f"{prefix}{name}/", scratch)
        paths = sorted(path for path in scratch.rglob("*") if path.is_file())
        said: list[Any] = [(str(path.relative_to(scratch)), sha256(path.read_bytes()).hexdigest()) for path in paths]
    if prefix == layout.VERSIONS:
        versions, version = Versions(run), Version.parse(name)
        said += [versions.step(version), versions.weights_sha256(version), versions.base(version)]
    return said


def _drawn(run: Run) -> list[Any]:
    """Return the draws of the step after each record, and the rows of the last draws."""
    buffer = make_buffer(run, parse(run.config), newest_attempt(run), Events(run, "reader", 0, logs=False))
    drawn, said = [], list[Any]()
    for record in read_chain(run):
        buffer.replay(record.sync)
        drawn = buffer.draw(record.step + 1)
        said.append(drawn)
    fetched = buffer.fetch(drawn)
    return [*said, *(_plain(getattr(fetched, field.name)) for field in fields(fetched))]


def _plain(value: Any) -> Any:
    if isinstance(value, Lists):
        return value.elements_N.tolist(), value.lengths_B.tolist()
    return value.tolist() if isinstance(value, np.ndarray) else value
