"""Check that a trainer with a single rank of FSDP2 takes the steps of a trainer without ranks, with every optimizer.

    python -m benchmarks.gpu_check.one_rank [--out FOLDER] [--small]

On a GPU the rank uses NCCL. `away` is the distance between the weights after two steps, relative to how far the steps
moved them. Both compute in float32.
"""

import tempfile
import time
from typing import Any, get_args

import torch

from benchmarks.gpu_check import stage
from benchmarks.gpu_check.stage import MEDIUM, SMALL, Shape
from benchmarks.training import Workload, make_rows
from tba.config import Config, OptimizerName
from tba.distributed.process_group import join, leave, open_meeting
from tba.distributed.ranks import whole
from tba.distributed.sharding import save_without_weights, shard, without_weights
from tba.distributed.world import LOOPBACK, World
from tba.models.policy import Policy
from tba.presets import preset
from tba.train.learner import Learner

STEPS = 2


def measure(small: bool) -> dict[str, Any]:
    shape = SMALL if small else MEDIUM
    world = World(rank=0, size=1, address=LOOPBACK)
    ranks = join(world, open_meeting(world), stage.device())
    try:
        return {"optimizers": {name: compared(name, shape, ranks) for name in get_args(OptimizerName)}}
    finally:
        leave()


def compared(name: str, shape: Shape, ranks: Any) -> dict[str, float]:
    config = preset("gsm8k").replace(
        {
            "training.optimizer": name, "training.compute_dtype": "float32", "training.prompts_per_step": 2,
            "training.groups_per_micro_batch": 1, "training.learning_rate": 1e-4, "training.warmup_steps": 0,
        }
    )  # fmt: skip
    start = weights(stage.random_policy(shape).model)
    plain, _ = trained(config, stage.random_policy(shape), shape)
    cpu = torch.device("cpu")
    with tempfile.TemporaryDirectory() as folder:
        policy = stage.random_policy(shape)
        save_without_weights(policy, folder)
        bare = without_weights(folder, dtype=torch.float32, trust_remote_code=False)
        policy.model.to(cpu)  # pyright: ignore[reportArgumentType]
        sharded = shard(bare, ranks, stage.device(), policy, compute_dtype="float32")
    ours, seconds = trained(config, sharded, shape)
    return {"away": float((ours - plain).norm() / (plain - start).norm()), "seconds_per_step": round(seconds, 4)}


def trained(config: Config, policy: Policy, shape: Shape) -> tuple[torch.Tensor, float]:
    """Take some steps on one batch. Return the weights and the seconds of the last step."""
    learner, seconds = Learner(config, policy), 0.0
    workload = Workload(name="", hidden=shape.hidden, layers=shape.layers, vocabulary=shape.vocabulary, groups=2)
    batch = learner.collate(make_rows(workload, config.training.responses_per_prompt))
    for step in range(1, STEPS + 1):
        stage.finish()
        began = time.perf_counter()
        learner.learn(step, batch)
        stage.finish()
        seconds = time.perf_counter() - began
    return weights(policy.model), seconds


def weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([whole(it.detach()).flatten().cpu() for it in model.parameters()])


if __name__ == "__main__":
    stage.run("one-rank", __doc__, measure)
