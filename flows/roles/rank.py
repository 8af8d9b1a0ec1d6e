"""One rank of a trainer that is spread over several processes: `python -m flows.roles.rank RUN`.

The place of the rank is in the environment variables of torchrun (tba/distributed/world.py). So torchrun can start the
ranks, or anything else that sets these variables. Rank 0 is the trainer: it holds the lease and the attempt. The other
ranks find rank 0 at `MASTER_ADDR` and `MASTER_PORT`, or, without these, by the record of the run's newest attempt under
`control/rendezvous/`. They end with rank 0. Once they have found rank 0, they ignore signals to stop: rank 0 stops
them.
"""

import argparse
import logging
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.roles.leading_rank import device_of, parts_of, shard_policy, with_ranks
from flows.roles.meeting import find_meeting
from flows.roles.role import run_role
from flows.roles.threads import switch_soon, use_threads
from flows.supervision.processes import FAILED, LOG_FORMAT, MISUSED
from storage.local_files.scratch import scratch_folder
from storage.runs.attempts import read_attempt
from storage.runs.run import Run
from storage.weights.checkpoints import Checkpoints
from tba.config import Config, parse
from tba.errors import ConfigError, TBAError
from tba.runtime.child import end_with_parent

if TYPE_CHECKING:
    from tba.distributed.orders import Order
    from tba.distributed.ranks import Ranks
    from tba.distributed.world import World
    from tba.train.learner import Learner
    from tba.train.training_state import TrainingState

log = logging.getLogger("tba")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m flows.roles.rank", description="Run one rank of a trainer.")
    parser.add_argument("run", metavar="RUN", help="path or URL of the run's folder")
    parser.add_argument("--child", action="store_true", help="end when the process that has started this rank ends")
    options = parser.parse_args()
    if options.child:
        end_with_parent()
    from tba.distributed.world import World

    try:
        world = World.of(os.environ)
    except ConfigError as error:
        parser.error(str(error))
    if world.rank == 0:
        logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
        return run_role("trainer", 0, options.run, world)
    # Ranks may write into the same log, so each line names its rank.
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT.replace("%(message)s", f"rank {world.rank}: %(message)s"))
    try:
        follow(Run.open(options.run), world)
    except TBAError as error:
        log.error("%s: %s", type(error).__name__, error)
        return MISUSED if isinstance(error, ConfigError) else FAILED
    except Exception as error:
        log.info("traceback:", exc_info=True)
        log.error("%s: %s", type(error).__name__, error)
        return FAILED
    return 0


def follow(run: Run, world: "World") -> None:
    """Join an attempt as this rank, and follow its rank 0 until the work is done."""
    config = with_ranks(parse(run.config), world)
    use_threads(config, world.local_size)
    switch_soon()
    from tba.distributed.followers import HAS_CHECKPOINT, part_key
    from tba.distributed.heartbeats import Heartbeats
    from tba.distributed.process_group import join, leave
    from tba.train.leader import Follower

    device, parts, limits = device_of(config, world), parts_of(config, world), config.limits
    meeting, attempt = find_meeting(run, world)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with scratch_folder() as scratch:
        with Heartbeats(meeting.store, world.rank, [0], every=limits.lease_every) as heartbeats:
            with heartbeats.reporting():
                checkpoint = fetch_checkpoint(run, attempt)
                meeting.store.set(part_key(HAS_CHECKPOINT, world.rank), "true")
                ranks = join(world, meeting, device, parts=parts)
            follower = Follower(
                make=lambda order: make_learner(config, ranks, device, order, scratch),
                load=lambda: load_state(checkpoint, ranks),
                store=lambda state: store_state(run, attempt, state, scratch),
            )
            follower.run(meeting.store, heartbeats, silent_after=limits.silent_after)
        leave()


def make_learner(config: Config, ranks: "Ranks", device: Any, order: "Order", scratch: Path) -> "Learner":
    """Return this rank's learner. The order carries the files of the model without its weights, which rank 0 sends
    weight by weight."""
    from tba.train.leader import write_files
    from tba.train.learner import Learner

    with tempfile.TemporaryDirectory(dir=scratch) as bare_model:
        write_files(order.said, order.numbers, Path(bare_model))
        return Learner(config, shard_policy(config, ranks, device, Path(bare_model)), ranks)


def fetch_checkpoint(run: Run, attempt: int) -> Path | None:
    """Return this machine's copy of the checkpoint that an attempt continues; None if it continues none. The download
    may take longer than a call of the process group may, so it comes before the rank joins."""
    checkpoint = read_attempt(run, attempt).continues
    return Checkpoints(run).load(*checkpoint, trusts_marks=True) if checkpoint else None


def load_state(checkpoint: Path | None, ranks: "Ranks") -> "TrainingState":
    """Read this rank's part of a checkpoint."""
    from tba.train.training_state import TrainingState

    assert checkpoint
    return TrainingState.load(checkpoint, ranks)


def store_state(run: Run, attempt: int, state: "TrainingState", scratch: Path) -> dict[str, Any]:
    """Store this rank's part of a checkpoint. Return the entry of its file in the manifest, which rank 0 writes."""
    from tba.train.training_state import optimizer_file

    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        sha256 = state.save_optimizer(Path(folder))
        file = Path(folder, optimizer_file(state.ranks))
        return Checkpoints(run).save_part(state.sync, attempt, file, sha256=sha256)


if __name__ == "__main__":
    sys.exit(main())
