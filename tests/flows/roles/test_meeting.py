"""Ranks find rank 0 of the newest attempt, and join nobody else. The ranks are real processes."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.planning import create
from flows.roles import leading_rank
from flows.roles.meeting import local_world, open_meeting
from storage.objects import records
from storage.runs.events import Events
from storage.runs.held_lease import HeldLease
from storage.runs.rendezvous import Rendezvous, announce, find_rendezvous
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from tba.config import parse
from tba.distributed.heartbeats import Heartbeats, greet
from tba.distributed.process_group import Group, Meeting, admit
from tba.errors import ConfigError, Stopped
from tba.presets import preset
from tests.support.waiting import until


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return create.start(preset("quickstart").replace({"training.ranks": 2}), str(tmp_path), "r")


@pytest.fixture
def meeting(run: Run) -> Iterator[Meeting]:
    """The meeting of attempt 1, whose rank 0 is the process of the test."""
    yield open_meeting(run, claim_attempt(run).number, local_world(2))


def started(run: Run, **variables: object) -> "subprocess.Popen[str]":
    said = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, **variables}
    environment = {**os.environ, **{name: str(value) for name, value in said.items()}}
    command = [*leading_rank.COMMAND, run.url]
    return subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)


def refused(run: Run, **variables: object) -> str:
    process = started(run, **variables)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 2, said
    return said.splitlines()[-1]


def at(meeting: Meeting) -> dict[str, object]:
    return {"MASTER_ADDR": meeting.address, "MASTER_PORT": meeting.port}


@pytest.mark.parametrize("knows_address", [True, False])
def test_a_rank_of_another_world_is_refused(run: Run, meeting: Meeting, knows_address: bool):
    said = refused(run, WORLD_SIZE=4, **(at(meeting) if knows_address else {}))
    assert "rank 1: ConfigError: WORLD_SIZE: attempt 1 has 2 ranks, got 4" in said


def test_a_rank_is_refused_by_a_group_with_another_token(run: Run, meeting: Meeting):
    """As if another trainer had got the port that the record names."""
    recorded = find_rendezvous(run, 1)
    assert recorded
    admit(meeting, Group(attempt=1, size=2, token="of another"))
    assert f"token: attempt 1 of {run.url} has recorded {recorded.token!r}, but rank 0 says 'of another'" in refused(
        run
    )


def test_a_superseded_attempt_attracts_nobody(run: Run, meeting: Meeting):
    claim_attempt(run)
    assert f"attempt: {run.url} is at attempt 2, but rank 0 leads attempt 1" in refused(run, **at(meeting))


def test_a_rank_that_is_there_already_is_refused(run: Run, meeting: Meeting):
    assert greet(meeting.store, 1) is None
    meeting.store.set("tba/name/1", "rank 1 of the trainer (pid 7 on another)")
    said = refused(run, **at(meeting))
    assert "RANK: rank 1 of the trainer (pid 7 on another) has joined attempt 1 already" in said


def test_a_rank_that_cannot_join_tells_rank_0_why(run: Run, meeting: Meeting, monkeypatch: pytest.MonkeyPatch):
    """Not all ranks are on this machine, but the rank reaches rank 0 by loopback."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with Heartbeats(meeting.store, 0, [1], every=0.2) as heartbeats:
        said = refused(run, LOCAL_WORLD_SIZE=1, **at(meeting))
        reported = heartbeats.reported(1, "rank 1")
    assert "GLOO_SOCKET_IFNAME must be set" in said
    assert reported and isinstance(reported.error, ConfigError) and str(reported.error) in said


@pytest.mark.timeout(100)
def test_rank_0_stops_while_it_waits_for_other_ranks(run: Run):
    with HeldLease(run, "trainer", every=60.0) as lease:
        lease.stop("enough")
        attempt, events = claim_attempt(run).number, Events(run, "trainer", 1)
        leading = leading_rank.lead_ranks(run, parse(run.config), attempt, local_world(2), lease, events)
        with pytest.raises(Stopped, match="enough"), leading:
            pass


def test_a_rank_waits_for_the_attempt_after_one_that_is_over(run: Run):
    claim_attempt(run)
    old = Rendezvous(attempt=1, address="127.0.0.1", port=1, size=3, token="old", created_at=records.now())
    announce(run, old)
    process = started(run)
    try:
        claim_attempt(run)
        meeting = open_meeting(run, 2, local_world(2))
        until(lambda: meeting.store.check(["tba/name/1"]), "the rank comes to attempt 2")
        assert f"(pid {process.pid} on " in meeting.store.get("tba/name/1").decode()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"RANK": 2}, "RANK must be a whole number from 0 to 1, got 2"),
        ({"RANK": ""}, "RANK must be a whole number from 0 to 1, got nothing"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE must be a whole number from 1 to 1024, got two"),
        ({"MASTER_PORT": 29500}, "MASTER_ADDR must be set where MASTER_PORT is 29500"),
        ({"WORLD_SIZE": 100}, "WORLD_SIZE: training.ranks must be <= training.prompts_per_step"),
    ],
)
def test_a_place_that_cannot_be_is_refused(run: Run, variables: dict[str, object], named: str):
    assert named in refused(run, **variables)
