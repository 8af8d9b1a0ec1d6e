"""All ranks of a trainer on one of its machines: `python -m flows.roles.node RUN --node 0 --nodes 2 --ranks 8`.

Each machine runs this once, and has as many ranks as the others. A machine with more or fewer ranks is refused when the
ranks meet. When a rank fails, its attempt is over. The other ranks then get time to report the reason and to end, and
are killed if they do not.
"""

import argparse
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

from flows.roles.leading_rank import COMMAND
from flows.supervision.gpus import usable
from flows.supervision.processes import FAILED, LOG_FORMAT, MISUSED
from storage.runs.run import Run
from tba.config import parse
from tba.distributed.world import World
from tba.errors import ConfigError, TBAError
from tba.runtime.child import END_PATIENCE

log = logging.getLogger("tba")

POLL = 0.2  # seconds between two looks at the ranks
STORING = 600.0
"""Seconds in which a rank 0 that knows of a lost rank may store the syncs that were closed before. Equal to `PATIENCE`
of tba/distributed/process_group.py, which this process does not import because importing torch takes seconds."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.roles.node", description="Run all ranks of a trainer on this machine."
    )
    parser.add_argument("run", metavar="RUN", help="path or URL of the run's folder")
    parser.add_argument("--node", type=int, default=0, help="number of this machine, from 0 (default 0)")
    parser.add_argument("--nodes", type=int, default=1, help="number of machines (default 1)")
    parser.add_argument("--ranks", type=int, help="number of ranks on each machine (default: its GPUs, or 1)")
    parser.add_argument("--address", default="", help="address of machine 0 (default: the run's storage says it)")
    parser.add_argument("--port", type=int, default=0, help="port of rank 0 at this address")
    options = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format=LOG_FORMAT)
    try:
        run = Run.open(options.run)
        config = parse(run.config)
        # Rank 0 notices the loss of a rank after `silent_after`. Ranks may need a few times END_PATIENCE to end.
        grace = config.limits.silent_after + 4 * END_PATIENCE
        ranks = len(usable(config)) or 1 if options.ranks is None else options.ranks
        places = places_of(options.node, options.nodes, ranks, options.address, options.port)
        return run_ranks(run, places, grace)
    except TBAError as error:
        log.error("%s: %s", type(error).__name__, error)
        return MISUSED if isinstance(error, ConfigError) else FAILED


def places_of(node: int, nodes: int, ranks: int, address: str = "", port: int = 0) -> list[dict[str, str]]:
    """Return the variables of each rank of one of several machines that have equally many ranks. Raise ConfigError,
    naming the argument, if there is no such machine."""
    if nodes < 1:
        raise ConfigError(f"nodes: must be at least 1, got {nodes}")
    if not 0 <= node < nodes:
        raise ConfigError(f"node: must be between 0 and {nodes - 1}, got {node}")
    if ranks < 1:
        raise ConfigError(f"ranks: must be at least 1, got {ranks}")
    if port and not address:
        raise ConfigError(f"address: must be given where port is {port}")
    first = World(rank=node * ranks, size=nodes * ranks, local_size=ranks, address=address, port=port)
    return [replace(first, rank=first.rank + it, local_rank=it).variables() for it in range(ranks)]


def run_ranks(run: Run, places: list[dict[str, str]], grace: float) -> int:
    """Start a rank at each place and wait until all have ended. Return the exit code of the first rank that did not end
    with 0, or 0. Ranks that are still there `grace` seconds after a rank has failed are killed, and rank 0 after
    `STORING` seconds more. Signals to stop are passed on as SIGTERM: rank 0 then stops in order, and the others end
    with it. All ranks end if this process is killed."""
    ranks = list["subprocess.Popen[bytes]"]()
    asked = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: asked.set())
    # Ctrl-C in a terminal reaches the ranks too. Only this process reacts to it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    for place in places:
        command, variables = [*COMMAND, run.url, "--child"], {**os.environ, **place}
        ranks.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, env=variables))
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    failed: float | None = None
    while any(rank.poll() is None for rank in ranks):
        if asked.is_set():
            asked.clear()
            for rank in ranks:
                rank.send_signal(signal.SIGTERM)
        if failed is None and any(rank.poll() for rank in ranks):
            failed = time.monotonic()
        for rank, place in zip(ranks, places, strict=True):
            patience = grace + (STORING if place["RANK"] == "0" else 0.0)
            if failed is not None and time.monotonic() > failed + patience:
                rank.kill()
        time.sleep(POLL)
    # A rank that was killed by a signal has a negative code, which is no exit code.
    codes = [code if code >= 0 else FAILED for code in (rank.wait() for rank in ranks)]
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
