"""A rank other than the first, for tests of ranks: `python -m tests.support.tba.a_rank SIZE RANK`."""

import sys
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from benchmarks.harness.tiny_models import tiny_llama, tiny_tokenizer
from tba import errors
from tba.config import Config, parse
from tba.distributed.ranks import PATIENCE, Ranks, join, leave
from tba.distributed.sharding import ShardedPolicy, shard, without_weights
from tba.models.policy import Policy
from tba.runtime.child import end_with_parent
from tba.runtime.messages import take_pipes
from tba.train.leader import follow
from tba.train.learner import Learner

CPU = torch.device("cpu")


def precise_policy(*, seed: int = 0, tied: bool) -> Policy:
    return Policy(tiny_llama(seed=seed, tied=tied).double(), tiny_tokenizer(), CPU)  # pyright: ignore


def sharded(made_of: str, ranks: Ranks, config: Config, source: PreTrainedModel | None = None) -> ShardedPolicy:
    """In double precision, but where bfloat16 is asked for, which goes with weights in float32."""
    compute_dtype = config.training.compute_dtype
    dtype = torch.float32 if compute_dtype == "bfloat16" else torch.float64
    bare = without_weights(made_of, dtype=dtype, trust_remote_code=False)
    return shard(bare, ranks, CPU, source, compute_dtype=compute_dtype)


def begin(size: int, rank: int, port: int, plain: dict[str, Any], made_of: str) -> Learner:
    if "error" in plain:
        raise getattr(errors, plain["error"], RuntimeError)("no room")
    if not dist.is_initialized():
        join(rank, size, dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=PATIENCE))
    ranks, config = Ranks(rank, size), parse(plain)
    return Learner(config, sharded(made_of, ranks, config), ranks)


if __name__ == "__main__":
    torch.set_num_threads(1)
    end_with_parent()
    size, rank = map(int, sys.argv[1:])
    follow(lambda said: begin(size, rank, *said), *take_pipes())
    leave()
