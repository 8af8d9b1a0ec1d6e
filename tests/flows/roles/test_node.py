"""The ranks of one machine of several: their places, and what happens to the rest when one fails. The ranks are real
processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.planning import create
from flows.roles import node
from flows.roles.node import places_of
from storage.runs.run import Run
from tba.distributed import process_group
from tba.errors import ConfigError
from tba.presets import preset

WITH_LITTLE_PATIENCE = """
import sys
from flows.roles.node import places_of, run_ranks
from storage.runs.run import Run
sys.exit(run_ranks(Run.open(sys.argv[1]), places_of(0, 2, 2), grace=1.0))
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create.start(preset("quickstart"), str(tmp_path), "r")


def test_all_machines_together_have_each_rank_once():
    places = [place for node in range(3) for place in places_of(node, 3, 2, "node-0", 29500)]
    assert [place["RANK"] for place in places] == ["0", "1", "2", "3", "4", "5"]
    assert [place["LOCAL_RANK"] for place in places] == ["0", "1"] * 3
    assert {(place["WORLD_SIZE"], place["LOCAL_WORLD_SIZE"]) for place in places} == {("6", "2")}
    assert {(place["MASTER_ADDR"], place["MASTER_PORT"]) for place in places} == {("node-0", "29500")}


@pytest.mark.parametrize(
    ("place", "named"),
    [
        ((0, 0, 1), "nodes: must be at least 1, got 0"),
        ((2, 2, 1), "node: must be between 0 and 1, got 2"),
        ((-1, 2, 1), "node: must be between 0 and 1, got -1"),
        ((0, 2, 0), "ranks: must be at least 1, got 0"),
        ((0, 2, 1, "", 29500), "address: must be given where port is 29500"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(place: tuple, named: str):
    with pytest.raises(ConfigError, match=named):
        places_of(*place)


def test_the_command_refuses_it_too(run: Run):
    command = [sys.executable, "-m", "flows.roles.node", run.url, "--nodes=2", "--node=2"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "ConfigError: node: must be between 0 and 1, got 2" in ended.stderr


def test_rank_0_gets_as_much_time_to_store_as_it_takes_itself():
    assert process_group.PATIENCE.total_seconds() == node.STORING


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_rank_that_waits_in_vain_ends_after_rank_0_has_failed(run: Run):
    """Rank 0 finds no such interface, and rank 1 would wait for ten minutes."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "none-such"}
    command = [sys.executable, "-c", WITH_LITTLE_PATIENCE, run.url]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2, "the exit code of rank 0"
    assert "GLOO_SOCKET_IFNAME: this machine has no interface 'none-such'" in ended.stderr
