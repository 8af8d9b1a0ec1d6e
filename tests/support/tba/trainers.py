"""A trainer over a buffer and a store in memory."""

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.harness import fakes
from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import EOS_ID, tiny_policy, trajectory
from tba.config import Config
from tba.fetched import Fetched
from tba.interfaces import Lease
from tba.models.policy import Policy
from tba.presets import preset
from tba.train.learner import Learner
from tba.train.sync_writer import SyncWriter
from tba.train.trainer import Trainer
from tba.train.training_state import TrainingState
from tba.types import Base, Draw, StepRecord, Trajectory, Version

PROMPTS, RESPONSES, STEPS, EVERY = 3, 2, 12, 2


def settings(**changes: Any) -> Config:
    return preset("quickstart").replace(
        {
            "training.steps": STEPS,
            "training.prompts_per_step": PROMPTS,
            "training.responses_per_prompt": RESPONSES,
            "training.groups_per_micro_batch": 2,
            "sync.every": EVERY,
            "sync.checkpoint_every": 3,
            "search.initial_fill": 6,
            "alarms.log_ratio": 0.0,  # the stored reference log-probabilities are made up
            **({"search.value_samples": 9} if changes.get("objective__name") == "vine-ppo" else {}),
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
    )


class Journal(list[str]):
    """Everything that a trainer has stored, in the order of storing: entries such as `ledger 3` and `version 3`."""


@dataclass
class Buffer:
    """Gives the same groups at every step: responses of two to four tokens, of which every second is right."""

    journal: Journal
    rewards: Mapping[int, float] = field(default_factory=dict)  # reward of the first response, by step
    broken: dict[int, Exception] = field(default_factory=dict)  # errors, by sync
    arrived: int = 6
    missing: set[int] = field(default_factory=set)  # rounds that do not arrive

    def sync(self, sync: int, *, step: int) -> int:
        if sync in self.broken:
            raise self.broken[sync]
        self.journal.append(f"record {sync}")
        return 6

    def replay(self, sync: int) -> None:
        for number in range(sync + 1):
            self.sync(number, step=0)

    def recorded(self, sync: int) -> bool:
        return False

    def ready(self, sync: int, *, step: int, until: int) -> bool:
        return sync not in self.missing

    def waiting(self) -> int:
        return self.arrived

    def queues(self) -> dict[str, Any]:
        return {"after": self.journal.count("record 1")}

    def restore(self, queues: Mapping[str, Any]) -> None: ...

    def draw(self, step: int) -> list[Draw]:
        return [
            Draw(
                step=step, slot=i, position=j, trajectory_id=f"0/{i}/{j}", prompt_id=f"p{i}", branch="recent",
                weight=1.0, age=2,
            )
            for i in range(PROMPTS)
            for j in range(RESPONSES)
        ]  # fmt: skip

    def fetch(self, draws: Sequence[Draw]) -> Fetched:
        return fetched_of(self.trajectories(draws))

    def trajectories(self, draws: Sequence[Draw]) -> list[Trajectory]:
        first = self.rewards.get(draws[0].step, 1.0)
        return [
            trajectory(
                prompt_id=d.prompt_id,
                prompt_tokens=(4 + d.slot, 13),
                response_tokens=(tokens := (*range(5 + d.position, 6 + d.slot + 2 * d.position), EOS_ID)),
                behaviour_logps=(-4.0,) * len(tokens),
                reward=first if d.slot == d.position == 0 else float(d.position),
                step_ends=(1, len(tokens)),
                step_values=(0.5, 0.25 * d.slot),
            )
            for d in draws
        ]


@dataclass
class Store:
    """Ledger, versions, checkpoints and metrics in one. Each can be made slow, or to fail."""

    journal: Journal
    slow: dict[str, float | Callable[[], float]] = field(default_factory=dict)  # seconds, by kind
    gates: dict[str, threading.Event] = field(default_factory=dict)  # events that entries of the journal wait for
    broken: dict[str, Exception] = field(default_factory=dict)  # errors, by entry of the journal
    records: list[StepRecord] = field(default_factory=list)
    written: list[dict[str, float]] = field(default_factory=list)
    dtypes: dict[str, set[torch.dtype]] = field(default_factory=dict)  # dtypes of checkpoints' weights, by entry
    digests: dict[int, str] = field(default_factory=dict)
    weights: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # by number of the version
    kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)  # weights of checkpoints, by sync
    changed: dict[int, float | None] = field(default_factory=dict)
    states: dict[int, TrainingState] = field(default_factory=dict)
    bases: dict[int, int | None] = field(default_factory=dict)
    whole: Collection[int] = ()  # versions that are stored whole although they have a base

    def take(self, kind: str, number: int) -> None:
        pause = self.slow.get(kind, 0.0)
        time.sleep(pause() if callable(pause) else pause)
        if gate := self.gates.get(f"{kind} {number}"):
            gate.wait(60)
        if error := self.broken.get(f"{kind} {number}"):
            raise error
        self.journal.append(f"{kind} {number}")

    def write_ledger(self, sync: int, records: Sequence[StepRecord], *, weights_sha256: str) -> None:
        self.take("ledger", sync)
        self.records += records
        self.digests[sync] = weights_sha256

    def publish(
        self,
        version: Version,
        *,
        step: int,
        folder: Path,
        weights_sha256: str,
        changed_share: float | None,
        base: Base | None,
        sha256s: Mapping[str, str] | None = None,
    ) -> bool:
        assert step == min(version.number * EVERY, STEPS)
        self.weights[version.number] = load_file(folder / "model.safetensors")
        self.changed[version.number] = changed_share
        self.bases[version.number] = base.version.number if base else None
        if base:
            found, wanted = load_file(base.folder / "model.safetensors"), self.weights[base.version.number]
            assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        self.take("version", version.number)
        return base is None or version.number in self.whole

    def save(self, sync: int, attempt: int, *, step: int, folder: Path) -> None:
        self.kept[sync] = load_file(folder / "model.safetensors")
        self.dtypes[f"checkpoint {sync}"] = {t.dtype for t in self.kept[sync].values()}
        self.states[sync] = TrainingState.load(folder)
        self.take("checkpoint", sync)

    def published(self) -> list[int]:
        return [int(entry.split()[1]) for entry in self.journal if entry.startswith("version")]


class LedgerOf:
    def __init__(self, store: Store):
        self.store = store

    def write(self, sync: int, records: Sequence[StepRecord], *, weights_sha256: str) -> None:
        self.store.write_ledger(sync, records, weights_sha256=weights_sha256)


class VersionsOf(fakes.Versions):
    def __init__(self, store: Store):
        super().__init__()
        self.store = store

    def publish(self, version: Version, **of_it: Any) -> bool:
        return self.store.publish(version, **of_it)

    def prune(self, *, keep: int, every: int) -> None:
        self.store.journal.append("prune versions")


class CheckpointsOf:
    def __init__(self, store: Store):
        self.store = store

    def save(
        self, sync: int, attempt: int, *, step: int, folder: Path,
        sha256s: Mapping[str, str] | None = None, stored: Sequence[Mapping[str, Any]] = (),
    ) -> None:  # fmt: skip
        assert not stored
        self.store.save(sync, attempt, step=step, folder=folder)

    def prune(self, keep: int) -> None:
        self.store.journal.append("prune checkpoints")


class MetricsOf:
    def __init__(self, store: Store, pause: float):
        self.store, self.pause = store, pause

    def write(self, metrics: dict[str, float], *, step: int) -> None:
        time.sleep(self.pause)  # a step takes at least this long
        self.store.written.append(metrics)

    def close(self) -> None: ...


class LeaseAt:
    """A lease whose check raises `verdict` once the role has told a number of steps."""

    def __init__(self, verdict: Exception, steps: int):
        self.verdict, self.left, self.said = verdict, steps, threading.Event()

    def tell(self, status: str, **progress: float) -> None:
        self.left -= status.startswith(("step", "stopping"))

    def check(self) -> None:
        if self.left <= 0:
            self.said.set()
            raise self.verdict


def make(
    folder: Path,
    config: Config,
    *,
    policy: Policy | None = None,
    lease: Lease | None = None,
    rewards: Mapping[int, float] | None = None,
    pause: float = 0.0,
    **store_settings: Any,
) -> tuple[Trainer, Store]:
    journal, lease = Journal(), lease or fakes.Lease()
    store = Store(journal, **store_settings)
    syncs = SyncWriter(
        config,
        attempt=1,
        ledger=LedgerOf(store),
        versions=VersionsOf(store),
        checkpoints=CheckpointsOf(store),
        lease=lease,
        scratch=folder,
    )
    trainer = Trainer(
        config,
        learner=Learner(config, policy or tiny_policy()),
        buffer=Buffer(journal, rewards or {}),
        syncs=syncs,
        metrics=MetricsOf(store, pause),
        lease=lease,
        events=fakes.Events(),
    )
    return trainer, store
