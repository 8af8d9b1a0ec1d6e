"""Run the benchmarks of the replay buffer: its index, its shards, and how much both slow down a gradient step.

    python -m benchmarks.buffer [--out FOLDER]

The index holds ten thousand to ten million trajectories. `benchmarks/index.py` measures draws, admissions and memory.
`benchmarks/shards.py` measures how shards are appended, found, fetched and read on resume.
`benchmarks/critical_path.py` measures gradient steps while the next batch is read. Each of them takes its own sizes,
can run alone, and says what it compares. The largest sizes need 6 GB of memory and 6 GB of disk.
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
