"""A small run made by the public parts of storage alone: without a model, with real draws and made-up residuals.

Two searchers, eight steps of two prompts x two responses, a sync every two steps. Attempt 1 dies after sync 3. Attempt
2 continues from the checkpoint of sync 2, takes steps 5 and 6 again and finishes. Two shards still wait at the end.
"""

import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from storage import layout
from storage.buffer.replay_buffer import DuckReplayBuffer
from storage.buffer.sampler import default_sampler
from storage.log.ledger import ParquetLedger
from storage.log.prompts import write_prompts
from storage.log.trajectories import Trajectories
from storage.objects import manifest_folders
from storage.runs.arithmetic import Arithmetic, note_arithmetic
from storage.runs.control import change_state
from storage.runs.events import Events
from storage.runs.retention import give_up
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.checkpoints import Checkpoints
from storage.weights.evaluations import Evaluations
from storage.weights.versions import Versions
from tba.config import Config
from tba.presets import preset
from tba.types import Base, Draw, Outcome, Score, StepRecord, Version
from tests.support.builders import make_example, make_prompt, make_shard

B, K, S, EVERY, STEPS = 2, 2, 3, 2, 8
LAST_SYNC = STEPS // EVERY
COMPUTED = Arithmetic(compute_dtype="bfloat16", device="cpu", threads=3, torch="2.13.0")
"""How attempt 2 computed. Of attempt 1 it is not stored, as in older runs."""
PROMPTS = [f"train/{n}" for n in range(6)]

STRANGERS = (
    "notes.txt", "steps/notes.txt", "steps/1-a1.parquet", "steps/0000000012-a0001.parquet",
    "draws/000001-a0001 (1).parquet", "draws/000001-a0001.parquet.bak", "versions/README.md",
    "versions/old/MANIFEST.json", "versions/3-a1/MANIFEST.json", "checkpoints/best/model.safetensors",
    "syncs/notes.json", "syncs/3.json", "attempts/notes.txt", "evaluations/best.json", "retention/why.txt",
    "events/trainer/notes.json", "prompts/train.parquet~", "prompts/train (copy).parquet", "prompts/old/train.parquet",
    "trajectories/readme.md", "trajectories/searcher=000/seq=00000000 (1).parquet",
    "trajectories/searcher=000 copy/seq=00000000.parquet", "roles/notes.txt",
)  # fmt: skip
"""Names of files that are not a run's own."""


def make_config() -> Config:
    return preset("quickstart").replace(
        {
            "training.steps": STEPS,
            "training.prompts_per_step": B,
            "training.responses_per_prompt": K,
            "training.groups_per_micro_batch": B,
            "search.searchers": 2,
            "search.responses_per_prompt": S,
            "search.prompts_per_round": 2,
            "search.initial_fill": 12,
            "sync.every": EVERY,
            "sync.checkpoint_every": 2,
            "evaluation.every": 2,
        }
    )


def make_run(root: str, name: str = "first") -> Run:
    """Make the run that is described above."""
    return SyntheticRun(root, name).finish().run


def make_live_run(root: str, name: str = "live") -> Run:
    """Make the run as it is while its first attempt takes step 5: the record of sync 3 exists, its ledger does not."""
    made = SyntheticRun(root, name).begin()
    buffer = made.take_syncs(1, range(1, 3), made.buffer(1))
    buffer.draw(5)
    made.search(version=2)
    buffer.sync(3, step=6)
    return made.run


def copy_run(run: Run, folder: Path) -> Run:
    """Copy a local run to another folder."""
    return Run.open(str(shutil.copytree(run.url, folder / run.name)))


class SyntheticRun:
    says_the_same = False  # True if all responses to a prompt have the same tokens
    says = ""  # the text of every response, also in examples, unless empty

    def __init__(self, root: str, name: str, **changes: Any):
        self.config = make_config().replace(changes)
        self.run = Run.create(
            root, name, config=self.config.to_dict(), sampler_sql=default_sampler(), code_version="test"
        )
        self.random = random.Random(0)
        self.queues: dict[int, dict[str, Any]] = {}  # the buffer's queues, which checkpoints keep, by sync
        change_state(self.run, desired="run", searchers=2, why="started")

    @classmethod
    def of(cls, run: Run) -> "SyntheticRun":
        """Return an existing run, through the store of the given run."""
        made = cls.__new__(cls)
        made.config, made.run, made.random, made.queues = make_config(), run, random.Random(0), {}
        return made

    def begin(self) -> "SyntheticRun":
        """Store everything before the first step."""
        write_prompts(self.run, "train", [make_prompt(prompt_id) for prompt_id in PROMPTS])
        write_prompts(self.run, "test", [make_prompt("test/0")])
        claim_attempt(self.run)
        self.publish(Version(0, 1))
        self.search(version=0)
        self.evaluate(Version(0, 1), 0.25)
        return self

    def finish(self) -> "SyntheticRun":
        self.begin()
        self.take_syncs(1, range(1, 4), self.buffer(1))
        attempt = claim_attempt(self.run)
        assert attempt.continues == Version(2, 1)
        note_arithmetic(self.run, 2, COMPUTED)
        Events(self.run, "trainer", 2).write("resumed", "attempt 2 goes on after step 4", severity="warning")
        self.publish(Version(2, 2))
        buffer = self.buffer(2)
        for sync in range(3):
            buffer.sync(sync, step=sync * EVERY)
        buffer.restore(self.queues[2])
        self.take_syncs(2, range(3, 5), buffer)
        self.evaluate(Version(2, 1), 0.5)
        self.evaluate(Version(LAST_SYNC, 2), 0.75)
        self.search(version=LAST_SYNC, attempt=2)
        change_state(self.run, desired="stop", why="finished")
        return self

    # --- the work of roles --------------------------------------------------------------------------------------------

    def search(self, *, version: int, attempt: int = 1) -> None:
        """Store the next round of each searcher. Rewards are higher for later versions."""
        log, cited = Trajectories(self.run), Version(version, attempt)
        for searcher in range(2):
            round = log.next_seq(searcher)
            asked = [PROMPTS[(2 * round + searcher + n) % len(PROMPTS)] for n in range(2)]
            rewards = {
                prompt_id: [float(self.random.random() < 0.3 + 0.1 * version) for _ in range(S)] for prompt_id in asked
            }
            mask = (True, False, False, True) if round % 2 else None
            steps = {"step_ends": (1, 4), "step_values": (0.25, 0.5)} if round % 3 else {}
            versions = {"version_start": cited, "version_end": cited}
            shard = make_shard(rewards, searcher=searcher, round=round, loss_mask=mask, **steps, **versions)
            if self.says_the_same:
                shard = [replace(it, response_tokens=shard[0].response_tokens) for it in shard]
            if self.says:
                shard = [replace(it, response=self.says) for it in shard]
            log.append(searcher, round, shard)

    def buffer(self, attempt: int) -> DuckReplayBuffer:
        return DuckReplayBuffer(
            self.run,
            self.config,
            sampler_sql=self.run.sampler_sql,
            attempt=attempt,
            events=Events(self.run, "trainer", attempt),
        )

    def take_syncs(
        self,
        attempt: int,
        syncs: Sequence[int],
        buffer: DuckReplayBuffer,
        *,
        version: Version | None = None,
    ) -> DuckReplayBuffer:
        """Store steps and syncs of one attempt, in the order of a trainer. Searchers use the newest version of attempt
        1 up to sync 3 and of attempt 2 later, unless `version` is given."""
        ledger, checkpoints = ParquetLedger(self.run, attempt), Checkpoints(self.run)
        if syncs[0] == 1:
            buffer.sync(0, step=0)
        for sync in syncs:
            steps = range((sync - 1) * EVERY + 1, sync * EVERY + 1)
            records = [self.step(step, sync, buffer.draw(step), attempt) for step in steps]
            number, of = version or (sync - 1, 1 if sync <= 3 else 2)
            self.search(version=number, attempt=of)
            buffer.sync(sync, step=sync * EVERY)
            self.queues[sync] = buffer.queues()
            ledger.write(sync, records, weights_sha256=f"{sync:064x}")
            self.publish(Version(sync, attempt))
            if sync % 2 == 0:
                with tempfile.TemporaryDirectory() as folder:
                    fill(folder, f"checkpoint {sync}")
                    checkpoints.save(sync, attempt, sync * EVERY, Path(folder))
        return buffer

    def step(self, step: int, sync: int, draws: Sequence[Draw], attempt: int) -> StepRecord:
        noise = [self.random.gauss(0, 1 / step) for _ in draws]
        outcomes = [
            Outcome(
                slot=draw.slot,
                position=draw.position,
                advantage=-0.05 * r,
                residual=r,
                log_z=1.0 + 0.1 * step,
                logp=-2.0,
                ref_logp=-2.1,
            )
            for draw, r in zip(draws, noise, strict=True)
        ]
        metrics: dict[str, float] = {
            "loss": sum(r * r for r in noise) / len(noise),
            "grad_norm": 1.0 / step,
            "lr": 3e-4,
            "beta": 0.05,
            "log_z": 1.0 + 0.1 * step,
            "residual_abs": sum(map(abs, noise)) / len(noise),
            "reward_mean": min(1.0, 0.3 + 0.05 * step),
            "age_mean": sum(draw.age for draw in draws) / len(draws),
            "age_max": float(max(draw.age for draw in draws)),
            "recent_share": sum(draw.branch == "recent" for draw in draws) / len(draws),
            "tokens": 3.0 * len(draws),
            "seconds_step": 0.5,
            "seconds_wait": 0.01,
            "seconds_forward_backward": 0.45,
        }
        return StepRecord(
            step=step,
            sync=sync,
            version=Version(sync - 1, attempt),
            draws=draws,
            outcomes=outcomes,
            metrics=metrics,
        )

    def publish(self, version: Version) -> None:
        """Publish a version. Versions of the second attempt are differences from its first version, if that exists."""
        first = Version(2, 2)
        base = first if version.attempt == 2 and first in Versions(self.run).complete() else None
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as bases:
            fill(folder, f"weights {version}")
            fill(bases, f"weights {base}")
            Versions(self.run).publish(
                version,
                step=version.number * EVERY,
                folder=Path(folder),
                weights_sha256=f"{version.number:064x}",
                base=Base(base, Path(bases)) if base else None,
            )

    def evaluate(self, version: Version, value: float) -> None:
        step = version.number * EVERY
        Evaluations(self.run).write(
            [
                Score(version=version, step=step, metric=metric, value=value - lower, n=100, seconds=2.5)
                for metric, lower in (("greedy", 0.0), ("sampled", 0.1), ("pass@4", -0.125), ("pass@16", -0.1875))
            ],
            [make_example(version, step=step, reward=value, **({"response": self.says} if self.says else {}))],
        )


def fill(folder: str, content: str) -> None:
    """Write the files of a version, as far as storage needs them."""
    Path(folder, "model.safetensors").write_bytes(content.encode() * 20)
    Path(folder, "config.json").write_text("{}")


def prune_version(run: Run, version: Version) -> None:
    """Give up a version the way pruning does."""
    give_up(run, versions=[version], why="a test")
    manifest_folders.remove(run.store, layout.version(version))


def put(run: Run, name: str, data: bytes) -> None:
    """Write a file into the folder of a run, as another program would, with any name."""
    path = Path(run.url) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
