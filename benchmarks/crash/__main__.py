"""Kill roles at every named publish point and at random instants: is anything lost, doubled or learned differently?

    python -m benchmarks.crash [--kills 320] [--in-training 0.625] [--stores local s3] [--seed 0] [--out FOLDER]

The roles of runs of a tiny policy are killed by SIGKILL and restarted, again and again: the trainer, its buffer
process, the searcher, the evaluator, and a process that compacts admitted shards. There are two kinds of runs.

- In runs that are killed *in training* the trainer or its buffer process is killed after the current attempt has
  stored one or two checkpoints. The next attempt then continues a checkpoint of the attempt that was killed, so the
  chain of attempts whose steps count grows by one attempt with every kill. Half of these kills hit a write of the
  trainer, before, during or after it; half come at a random instant within the following steps. The evaluator begins
  after the last kill.
- In the other runs any role is killed at any time of its life. Half of these kills hit one of the writes in
  `benchmarks/crash/kills.py`, before, during or after it; half come at a random instant.

After each kill, `tba check` must find no problem. When a run has finished, every object whose write was acknowledged
must still be stored, byte for byte (a compacted shard: with the same checksum). The first and the last version must
have scores, and no version may have scores twice. The chain must cross every attempt that was killed in training. A
fork that replays the run's records from the start without interruption must draw the same trajectories, compute the
same numbers for each of them, and end every sync with the same weights.

`s3` is Ceph's gateway if it is installed, else a simulation of S3.
"""

import argparse
import json
import logging
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.crash.kills import kills_at_any_time, kills_in_training
from benchmarks.crash.results import Findings
from benchmarks.crash.runs import SETTINGS, measure
from benchmarks.harness import servers
from benchmarks.harness.hardware import hardware


@contextmanager
def root_of(store: str, scratch: Path) -> Iterator[tuple[str, str]]:
    """Start a store, `local` or `s3`. Yield its label in the results, and the root of the runs."""
    if store == "local":
        yield "local disk", str(scratch / "local")
        return
    with ExitStack() as stack:
        os.environ.update(stack.enter_context(servers.s3(scratch)).environment())
        yield "S3 (simulated)" if servers.lacking_for_ceph() else "S3 (Ceph)", f"s3://{servers.BUCKET}/crash"


def write_results(results: Sequence[Findings], seed: int, folder: Path | None) -> None:
    """Write the results so far, because all of them take a long time."""
    if not folder:
        return
    folder.mkdir(parents=True, exist_ok=True)
    facts = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        **hardware(),
        "seed": seed,
        "settings": SETTINGS,
        "results": [findings.facts() for findings in results],
    }
    (folder / "crash.json").write_text(json.dumps(facts, indent=1) + "\n")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=320, help="number of kills on each store (default 320)")
    parser.add_argument(
        "--in-training",
        type=float,
        default=0.625,
        help="share of the kills that wait until the attempt has stored a checkpoint (default 0.625: 200 of 320)",
    )
    parser.add_argument("--stores", nargs="+", choices=["local", "s3"], default=["local", "s3"])
    parser.add_argument("--at-once", type=int, default=2, help="number of runs at the same time (default 2)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder for the results as JSON")
    parser.add_argument("--scratch", type=Path, help="folder for runs and logs, to look at afterwards (default: none)")
    options = parser.parse_args(arguments)
    if not 0 <= options.in_training <= 1:
        parser.error(f"--in-training must be between 0 and 1, got {options.in_training:g}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    logging.disable(logging.WARNING)
    from benchmarks.harness.tiny_models import tiny_folder  # imports torch, which `--help` does not need

    # A process that is killed leaves its semaphores to the resource tracker, which would warn about them at the end.
    os.environ["PYTHONWARNINGS"] = "ignore::UserWarning:multiprocessing.resource_tracker"
    results: list[Findings] = []
    in_training = round(options.kills * options.in_training)
    with ExitStack() as stack:
        scratch = options.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tba-crash-")))
        scratch.mkdir(parents=True, exist_ok=True)
        os.environ["TBA_CACHE"] = str(scratch / "cache")
        policy = tiny_folder(scratch / "policy")
        for store in options.stores:
            with root_of(store, scratch) as (kind, root):
                chance = random.Random(options.seed)
                phases = (
                    kills_in_training(in_training, chance),
                    kills_at_any_time(options.kills - in_training, chance),
                )
                results.append(Findings(kind))
                for kills in phases:
                    measure(
                        results[-1],
                        root,
                        policy,
                        kills,
                        scratch=scratch,
                        seed=options.seed,
                        at_once=options.at_once,
                        keep=lambda: write_results(results, options.seed, options.out),
                    )
    for findings in results:
        print(findings, f"({findings.seconds:.0f} s)")
        for fault in findings.faults[:20]:
            print("  ", fault)
    return int(any(findings.faults for findings in results))


if __name__ == "__main__":
    sys.exit(main())
