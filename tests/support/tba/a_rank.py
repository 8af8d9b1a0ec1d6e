"""A trainer's ranks without a run: `led` leads them from the process of a test, and `python -m
tests.support.tba.a_rank` is a rank other than 0."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import debug

from benchmarks.harness.tiny_models import tiny_llama, tiny_tokenizer
from tba import errors
from tba.config import Config, parse
from tba.distributed.followers import Followers, await_ranks, start_children
from tba.distributed.heartbeats import Heartbeats, greet
from tba.distributed.orders import Order
from tba.distributed.process_group import Group, Meeting, admit, join, leave, open_meeting, reach
from tba.distributed.ranks import Ranks
from tba.distributed.sharding import ShardedPolicy, save_without_weights, shard, without_weights
from tba.distributed.world import LOOPBACK, World
from tba.models.adapters import adapter_like
from tba.models.policy import Policy
from tba.runtime.child import end_with_parent
from tba.train import leader
from tba.train.leader import Follower, LeadingLearner
from tba.train.learner import Learner
from tba.train.training_state import TrainingState, optimizer_file

CPU = torch.device("cpu")
RANK = [sys.executable, "-m", "tests.support.tba.a_rank"]
EVERY = 0.2  # seconds between two heartbeats
TIMES = "TBA_TEST_TIMES"
"""The environment variable with three numbers of seconds, as a rank other than 0 uses them: between two heartbeats,
until a silent rank 0 is lost, and until the rank then ends."""

PARTS = "TBA_TEST_PARTS"
"""The environment variable with the folder in which a rank stores its parts of checkpoints."""

COPIED = "TBA_TEST_COPIED"
"""The environment variable with the number of ranks that hold one copy of the weights; 0 means all."""


def precise_policy(*, seed: int = 0, tied: bool, config: Config | None = None) -> Policy:
    """Return a policy in double precision, with an adapter if the settings ask for one."""
    model, adapter = tiny_llama(seed=seed, tied=tied), None
    if config and config.model.lora_rank:
        adapter = adapter_like(config.model, Path(), base_sha256="of a base")
        adapter.put_into(model, seed=seed)
    return Policy(model.double(), tiny_tokenizer(), CPU, adapter=adapter)  # pyright: ignore


def sharded(made_of: str, ranks: Ranks, config: Config, source: Policy | None = None) -> ShardedPolicy:
    """Return a sharded policy in double precision. Its weights are float32 if it computes in bfloat16, and bfloat16
    with a `model.dtype` of bfloat16."""
    compute_dtype, model = config.training.compute_dtype, config.model
    lower = torch.float32 if model.dtype == "float32" else torch.bfloat16
    precise = compute_dtype != "bfloat16" and lower == torch.float32
    bare = without_weights(
        made_of, dtype=torch.float64 if precise else lower, trust_remote_code=False,
        adapter=adapter_like(model, Path(made_of), base_sha256="") if model.lora_rank else None,
    )  # fmt: skip
    if precise:
        bare.model.double()  # pyright: ignore
    return shard(bare, ranks, CPU, source, compute_dtype=compute_dtype)


@contextmanager
def led(
    size: int,
    *,
    silent_after: float = 60.0,
    grace: float = 30.0,
    parts: Path | None = None,
    times: str = f"{EVERY} 60 10",
    late: float = 0.0,
    each: int = 0,
    others: int | None = None,
) -> Iterator[Followers]:
    """Start ranks, and lead them as rank 0. `late` is for how many seconds rank 0 waits after the others have come.
    `each` is the number of ranks that hold one copy of the weights, 0 for all; `others` is that number as the other
    ranks believe it."""
    world = World(rank=0, size=size, local_size=size, address=LOOPBACK)
    meeting = open_meeting(world)
    admit(meeting, Group(attempt=1, size=size, token="of a test"))
    said = {PARTS: str(parts), TIMES: times, COPIED: str(each if others is None else others)}
    places = {
        rank: replace(world, rank=rank, local_rank=rank, port=meeting.port).variables() | said
        for rank in range(1, size)
    }
    with start_children(RANK, places) as children:
        names = await_ranks(meeting.store, size, children, 60.0)
        time.sleep(late)
        with Followers(
            meeting.store, names, children=children, every=EVERY, silent_after=silent_after, grace=grace, parts=each
        ) as followers:
            try:
                join(world, meeting, CPU, parts=each)
                yield followers
            finally:
                followers.release()
                leave()
                # torch remembers how it computed with distributed tensors, with process groups that are now gone.
                debug._clear_sharding_prop_cache()


def begun(
    followers: Followers, config: Config, policy: Policy, scratch: Path, checkpoint: Path | None = None
) -> LeadingLearner:
    """Let all ranks make a learner, and return that of rank 0. `scratch` is a folder that all ranks can read."""
    save_without_weights(policy, scratch)

    def begin() -> LeadingLearner:
        return LeadingLearner(config, sharded(str(scratch), followers.ranks, config, policy), followers)

    learner = followers.together("begin", begin, [config.to_dict(), str(scratch), str(checkpoint)])[0]
    if checkpoint:
        learner.restore(TrainingState.load(checkpoint, followers.ranks))
    return learner


def _follow(world: World) -> None:
    meeting = Meeting(reach(world.address, world.port), world.address, world.port)
    assert greet(meeting.store, world.rank) is None
    each = int(os.environ[COPIED])
    checkpoints, ranks = list[str](), Ranks(world.rank, world.size, each)

    def make(order: Order) -> Learner:
        plain, made_of, checkpoint = order.said
        if "error" in plain:
            raise getattr(errors, plain["error"], ValueError)("no room")
        if "sleeps" in plain:
            time.sleep(plain["sleeps"])
        checkpoints.append(checkpoint)
        config = parse(plain)
        return Learner(config, sharded(made_of, ranks, config), ranks)

    def load() -> TrainingState:
        return TrainingState.load(Path(checkpoints[-1]), ranks)

    every, silent_after, leader.END_PATIENCE = map(float, os.environ[TIMES].split())
    with Heartbeats(meeting.store, world.rank, [0], every=every) as heartbeats:
        join(world, meeting, CPU, parts=each)
        Follower(make, load, _store).run(meeting.store, heartbeats, silent_after=silent_after)
    leave()


def _store(state: TrainingState) -> Mapping[str, Any]:
    folder = Path(os.environ[PARTS])
    state.save_optimizer(folder)
    return {"name": optimizer_file(state.ranks), "folder": str(folder)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    end_with_parent()
    _follow(World.of(os.environ))
