"""Scratch folders of a killed trainer are removed; those of a living trainer stay."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.commands.compact import compact_run
from flows.planning import create
from storage.runs.run import Run
from tba.presets import preset

TRAINER = """
import sys, time
from storage.local_files.scratch import scratch_folder
from storage.runs.run import Run
with scratch_folder(Run.open(sys.argv[1]).folder) as folder:
    (folder / "weights").write_text("much")
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def trainer() -> Iterator[Callable[[Run], tuple[subprocess.Popen[str], Path]]]:
    """Start a process that uses a scratch folder of a run, as a trainer does."""
    started = list[subprocess.Popen[str]]()

    def start(run: Run) -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen([sys.executable, "-c", TRAINER, run.url], stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout
        return process, Path(process.stdout.readline().strip())

    yield start
    for process in started:
        with process:
            process.kill()


@pytest.mark.parametrize("how", ["another run starts", "the run is compacted"])
def test_scratch_of_a_killed_process_is_removed(
    tmp_path: Path, trainer: Callable[[Run], tuple[subprocess.Popen[str], Path]], how: str
):
    config = preset("quickstart")
    runs = [create.start(config, str(tmp_path), name) for name in ("killed", "alive")]
    (killed, left), (_, used) = map(trainer, runs)

    def clean() -> None:
        if how == "another run starts":
            create.start(config, str(tmp_path), f"another-{left.exists()}-{killed.poll()}")
        else:
            for run in runs:
                compact_run(run)

    clean()
    assert (left / "weights").exists() and (used / "weights").exists()
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    clean()
    assert not left.exists() and (used / "weights").exists()
