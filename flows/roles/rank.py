"""The processes of a trainer with several ranks. The trainer is rank 0 and starts the other ranks with
`python -m flows.roles.rank`.

The other ranks end when the trainer ends, for whatever reason. They ignore signals to stop: the trainer stops them.
"""

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.roles.threads import switch_soon, use_threads
from flows.supervision.processes import LOG_FORMAT
from storage.runs.run import Run
from tba.config import Config, parse
from tba.errors import ConfigError
from tba.runtime.child import end_with_parent, module_command
from tba.runtime.messages import take_pipes

if TYPE_CHECKING:
    from tba.distributed.ranks import Ranks
    from tba.models.policy import Policy
    from tba.train.learner import Learner
    from tba.train.training_state import TrainingState

log = logging.getLogger("tba")

COMMAND = module_command("flows.roles.rank")


@contextmanager
def start_ranks(
    run: Run, config: Config, policy: "Policy", checkpoint: Path | None, *, scratch: Path, tell: Any
) -> "Iterator[tuple[Learner, TrainingState | None]]":
    """Start the other ranks, if there are any. Yield the learner of the trainer, which leads the other ranks, and the
    training state in `checkpoint` (None without a checkpoint). The other ranks end with the `with` block."""
    from tba.distributed.ranks import ALONE, join, leave, open_port
    from tba.train.leader import Followers, LeadingLearner
    from tba.train.learner import Learner
    from tba.train.training_state import TrainingState

    size = config.training.ranks
    if size == 1:
        yield Learner(config, policy), TrainingState.load(checkpoint, ALONE) if checkpoint else None
        return
    from tba.distributed.sharding import save_without_weights

    tell(f"starting {size} ranks")
    with (
        Followers([*COMMAND, "--run", run.url, "--rank"], size) as followers,
        tempfile.TemporaryDirectory(dir=scratch) as bare_model,
    ):
        save_without_weights(policy, bare_model)
        store = open_port(size)
        try:

            def begin() -> Learner:
                ranks = join(0, size, store)
                sharded = _shard(config, ranks, bare_model, policy.model)
                return LeadingLearner(
                    config, sharded, ranks, followers=followers, scratch=scratch, checkpoint=checkpoint
                )

            learner, *_ = followers.together("begin", begin, [store.port, bare_model])
            yield learner, TrainingState.load(checkpoint, learner.ranks) if checkpoint else None
        finally:
            followers.release()
            leave()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m flows.roles.rank", description="One more rank of a trainer.")
    parser.add_argument("--run", required=True)
    parser.add_argument("--rank", type=int, required=True)
    options = parser.parse_args()
    # All ranks write into the trainer's log, so each line names its rank.
    log_format = LOG_FORMAT.replace("%(message)s", f"rank {options.rank}: %(message)s")
    logging.basicConfig(level=logging.INFO, format=log_format)
    end_with_parent()
    orders, answers = take_pipes()
    config = parse(Run.open(options.run).config)
    use_threads(config)
    switch_soon()
    from tba.distributed.ranks import leave
    from tba.train.leader import follow

    try:
        follow(lambda said: begin(config, options.rank, *said), orders, answers)
    except Exception:  # `follow` has sent the error to the trainer
        log.info("traceback:", exc_info=True)
        sys.exit(1)
    leave()


def begin(config: Config, rank: int, port: int, bare_model: str) -> "Learner":
    """Join the process group at `port`, and return this rank's learner. `bare_model` is a folder with the model without
    its weights: rank 0 sends the weights."""
    import torch.distributed as dist

    from tba.distributed.ranks import PATIENCE, join
    from tba.train.learner import Learner

    size = config.training.ranks
    ranks = join(rank, size, dist.TCPStore("127.0.0.1", port, size, is_master=False, timeout=PATIENCE))
    return Learner(config, _shard(config, ranks, bare_model), ranks)


def _shard(config: Config, ranks: "Ranks", bare_model: str, source: Any = None) -> "Policy":
    from tba.distributed.sharding import shard, without_weights
    from tba.models.pretrained import resolve_dtype

    model, device = config.model, _device(config, ranks.rank)
    bare = without_weights(bare_model, dtype=resolve_dtype(model.dtype), trust_remote_code=model.trust_remote_code)
    return shard(bare, ranks, device, source, compute_dtype=config.training.compute_dtype)


def _device(config: Config, rank: int) -> Any:
    """Return the device of a rank: one of the trainer's GPUs, or the CPU."""
    import torch

    from tba.models.pretrained import resolve_device

    device = resolve_device(config.model.device)
    if device.type != "cuda":
        return device
    if (there := torch.cuda.device_count()) < config.training.ranks:
        raise ConfigError(
            f"training.ranks: each rank needs a GPU, and the trainer may use {there}, got {config.training.ranks}"
        )
    return torch.device("cuda", rank)


if __name__ == "__main__":
    main()
