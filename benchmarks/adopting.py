"""Measure what share of its time a searcher of the quickstart spends on new versions, in real runs.

    python -m benchmarks.adopting [--runs 3] [--steps 100] [--every 2] [--against CHECKOUT] [--out FOLDER]

Each run is a `tba run quickstart` on a local disk, which publishes a version every `--every` steps. The searcher's
lease says how the searcher spent its time: the seconds of `adopt` are those in which it stood still to look for a
version and to adopt it. Times count from the first lease after the first shard to the last lease, so starting does not
count. With `--against`, runs of another checkout of this repository alternate with runs of this one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.harness.hardware import hardware, results_file
from storage.layout import run_url
from storage.runs.events import read_events
from storage.runs.leases import read_leases
from storage.runs.run import Run
from tba.errors import StorageError

HERE = Path(__file__).parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=2)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    arms = {"this": HERE} | ({"against": options.against.absolute()} if options.against else {})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for number in range(options.runs):
        for name in sorted(arms, reverse=number % 2 == 1):
            with tempfile.TemporaryDirectory() as root:
                found[name].append(measure(arms[name], root, options))
            print(f"{name:8} {found[name][-1]}", flush=True)
    shares = {name: statistics.median(it["share"] for it in runs) for name, runs in found.items()}
    record = {"measured": f"{datetime.now(UTC):%Y-%m-%d}", **hardware(), "steps": options.steps, "every": options.every}
    record |= {"median_share": shares, "each": found}
    options.out.mkdir(parents=True, exist_ok=True)
    path = results_file(options.out, "adopting")
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"median shares: {shares}\nwritten to {path}")


def measure(checkout: Path, root: str, options: argparse.Namespace) -> dict[str, float]:
    name, changes = "adopting", [f"sync.every={options.every}", f"training.steps={options.steps}"]
    command = [sys.executable, "-P", "-m", "flows.cli", "run", "quickstart", "--root", root, "--name", name]
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    reports: list[tuple[float, Mapping[str, float]]] = []
    with subprocess.Popen(
        [*command, "--set", *changes], env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while process.poll() is None:
            time.sleep(0.2)
            progress = progress_of_the_searcher(run_url(root, name))
            if progress.get("shards") and (not reports or reports[-1][1] != progress):
                reports.append((time.monotonic(), progress))
    if process.returncode or len(reports) < 2:
        raise SystemExit(f"the run of {checkout} failed, or ended before its searcher had reported progress twice")
    return shares(reports, Run.open(run_url(root, name)))


def progress_of_the_searcher(url: str) -> Mapping[str, float]:
    with suppress(StorageError):
        for lease in read_leases(Run.open(url)):
            if lease.role.startswith("searcher"):
                return lease.progress
    return {}


def shares(reports: list[tuple[float, Mapping[str, float]]], run: Run) -> dict[str, float]:
    (began, first), (ended, last) = reports[0], reports[-1]
    spent = {part: last[part] - first.get(part, 0.0) for part in last}
    total = sum(seconds for part, seconds in spent.items() if part.startswith("seconds_"))
    adopted = sum(event["kind"] == "version-adopted" for event in read_events(run)) - 1
    return {
        "share": round(spent["seconds_adopt"] / total, 5),
        "milliseconds_per_version": round(1000 * spent["seconds_adopt"] / adopted, 2),
        "versions": adopted,
        "shards": spent["shards"],
        "tokens_per_second": round(spent["tokens"] / total),
        "seconds": round(ended - began, 1),
    }


if __name__ == "__main__":
    main()
