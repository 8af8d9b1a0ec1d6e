"""Rank 0 of a trainer that is spread over several ranks. It starts the other ranks on this machine, unless something
else, such as torchrun, starts them (flows/roles/rank.py)."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flows.roles.meeting import local_world, open_meeting
from storage.runs.events import Events
from storage.runs.run import Run
from tba.config import Config
from tba.errors import ConfigError
from tba.interfaces import Lease
from tba.runtime.child import module_command

if TYPE_CHECKING:
    import torch

    from tba.distributed.followers import Followers
    from tba.distributed.ranks import Ranks
    from tba.distributed.world import World
    from tba.models.policy import Policy
    from tba.train.learner import Learner
    from tba.train.training_state import TrainingState

COMMAND = module_command("flows.roles.rank")


def with_ranks(config: Config, world: "World | None") -> Config:
    """Return the settings with as many ranks as were started. Raise ConfigError if they do not allow so many."""
    if world is None or world.size == config.training.ranks:
        return config
    try:
        return config.replace({"training.ranks": world.size})
    except ConfigError as error:
        raise ConfigError(f"WORLD_SIZE: {error}") from None


def parts_of(config: Config, world: "World") -> int:
    """Return the number of ranks that hold one copy of the weights. Raise ConfigError if the settings want a copy on
    each machine, but the ranks of a machine do not follow one another."""
    if config.training.copy_per == "trainer":
        return world.size
    if world.size % world.local_size or world.rank % world.local_size != world.local_rank:
        raise ConfigError(
            f"LOCAL_WORLD_SIZE must divide WORLD_SIZE ({world.size}) where training.copy_per is 'node', and "
            f"LOCAL_RANK must be RANK ({world.rank}) modulo LOCAL_WORLD_SIZE, got LOCAL_WORLD_SIZE {world.local_size} "
            f"and LOCAL_RANK {world.local_rank}"
        )
    return world.local_size


def device_of(config: Config, world: "World") -> "torch.device":
    """Return the device of a rank: the GPU with the rank's number on its machine, or the CPU."""
    import torch

    from tba.models.pretrained import resolve_device

    device = resolve_device(config.model.device)
    if device.type != "cuda":
        return device
    if (there := torch.cuda.device_count()) <= world.local_rank:
        raise ConfigError(
            f"training.ranks: each rank needs a GPU, and rank {world.rank}, which is number {world.local_rank} on its "
            f"machine (LOCAL_RANK), may use {there} there"
        )
    return torch.device("cuda", world.local_rank)


def shard_policy(
    config: Config, ranks: "Ranks", device: "torch.device", bare_model: Path, source: "Policy | None" = None
) -> "Policy":
    """Return this rank's part of the policy. `bare_model` is a folder with the model without its weights; only rank 0
    has the weights, in the policy `source`."""
    from tba.distributed.sharding import shard, without_weights
    from tba.models.adapters import adapter_like
    from tba.models.pretrained import resolve_dtype

    model = config.model
    bare = without_weights(
        bare_model, dtype=resolve_dtype(model.dtype), trust_remote_code=model.trust_remote_code,
        adapter=adapter_like(model, bare_model, base_sha256="") if model.lora_rank else None,
    )  # fmt: skip
    return shard(bare, ranks, device, source, compute_dtype=config.training.compute_dtype)


@dataclass(frozen=True)
class LeadingRank:
    """Rank 0, once the other ranks have joined. A trainer with one process has no followers."""

    config: Config
    followers: "Followers | None" = None
    device: "torch.device | None" = None

    def learner(
        self, policy: "Policy", checkpoint: Path | None, *, scratch: Path
    ) -> "tuple[Learner, TrainingState | None]":
        """Return the learner of the trainer, which leads the other ranks if there are any, and the training state in
        `checkpoint` (None without a checkpoint)."""
        from tba.distributed.ranks import ALONE
        from tba.train.learner import Learner
        from tba.train.training_state import TrainingState

        followers = self.followers
        learner = self._begin(followers, policy, scratch) if followers else Learner(self.config, policy)
        ranks = followers.ranks if followers else ALONE
        return learner, TrainingState.load(checkpoint, ranks) if checkpoint else None

    def _begin(self, followers: "Followers", policy: "Policy", scratch: Path) -> "Learner":
        from tba.distributed.sharding import save_without_weights
        from tba.train.leader import LeadingLearner, files_as_numbers

        device = self.device
        assert device
        with tempfile.TemporaryDirectory(dir=scratch) as bare_model:
            save_without_weights(policy, bare_model)

            def begin() -> LeadingLearner:
                sharded = shard_policy(self.config, followers.ranks, device, Path(bare_model), policy)
                return LeadingLearner(self.config, sharded, followers)

            return followers.together("begin", begin, *files_as_numbers(Path(bare_model)))[0]


@contextmanager
def lead_ranks(
    run: Run, config: Config, attempt: int, world: "World | None", lease: Lease, events: Events
) -> Iterator[LeadingRank]:
    """Wait until all other ranks of an attempt have joined this one, rank 0. Without a `world`, start them on this
    machine. They end with the `with` block. While it waits for them, rank 0 also stops if it is asked to."""
    from tba.distributed.followers import HAS_CHECKPOINT, Followers, await_ranks, start_children
    from tba.distributed.process_group import PATIENCE, join, leave

    if (size := config.training.ranks) == 1:
        yield LeadingRank(config)
        return
    lease.tell(f"waiting for {size - 1} more ranks")
    here = world or local_world(size)
    device, parts = device_of(config, here), parts_of(config, here)
    meeting, limits = open_meeting(run, attempt, here), config.limits
    report = partial(events.write, "failed", severity="error")
    places = {} if world else {rank: _place(here, rank, meeting.port) for rank in range(1, size)}
    with start_children([*COMMAND, run.url, "--child"], places) as children:
        names = await_ranks(meeting.store, size, children, PATIENCE.total_seconds(), lease.check)
        with Followers(
            meeting.store,
            names,
            children=children,
            every=limits.lease_every,
            silent_after=limits.silent_after,
            report=report,
            parts=parts,
        ) as followers:
            try:
                followers.stored_parts(HAS_CHECKPOINT)
                join(here, meeting, device, parts=parts)
                yield LeadingRank(config, followers, device)
            finally:
                followers.release()
                leave()


def _place(world: "World", rank: int, port: int) -> dict[str, str]:
    return replace(world, rank=rank, local_rank=rank, port=port).variables()
