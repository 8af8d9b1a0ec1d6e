"""The replay buffer from ten thousand to ten million trajectories: its index, its shards and what a step feels of both.

    python -m benchmarks.buffer [--out FOLDER]

`benchmarks/index.py` draws, admits and counts memory; `benchmarks/shards.py` appends, finds arrivals, fetches and
resumes; `benchmarks/critical_path.py` reads beside gradient steps. Each says what it compares with, takes sizes of its
own, and runs alone too. The largest sizes need 6 GB of memory and as much of disk.
"""

import argparse
from pathlib import Path

from benchmarks import critical_path, index, shards


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    for part in (index, shards, critical_path):
        part.main(["--out", str(options.out)])


if __name__ == "__main__":
    main()
