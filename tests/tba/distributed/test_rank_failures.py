"""If a rank of a trainer fails, dies or gives no sign of life, all ranks end, and the error names the rank."""

import os
import re
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

from tba.distributed.process_group import open_meeting
from tba.distributed.world import World
from tba.errors import ConfigError, RunFailed
from tests.support.tba.a_rank import begun, led, precise_policy
from tests.support.tba.trainers import settings
from tests.support.waiting import until

WHO = r"rank {} of the trainer \(pid \d+ on \S+\)"


def failing(error: str) -> list[object]:
    """Return what the order `begin` says, so that the other ranks fail with an error of this class."""
    return [{"error": error}, "", ""]


@pytest.mark.parametrize(
    ("met", "raised", "says"),
    [
        pytest.param("RunFailed", RunFailed, "^no room$", marks=pytest.mark.long),
        ("ValueError", RunFailed, f"^{WHO.format(1)}: ValueError: no room$"),
    ],
)
def test_what_goes_wrong_at_another_rank_is_told_by_the_first(met, raised, says):
    with led(2) as followers, pytest.raises(raised, match=says):
        followers.together("begin", lambda: "mine", failing(met))


def test_a_rank_that_is_killed_ends_what_the_others_do(tmp_path: Path):
    """Rank 1 fails too, because it loses the connection, but it is not blamed."""
    with led(3) as followers:
        begun(followers, settings(), precise_policy(tied=True), tmp_path)
        os.kill(followers.children[2].pid, signal.SIGKILL)
        with pytest.raises(RunFailed, match=f"^{WHO.format(2)} has died \\(SIGKILL\\)$"):
            followers.together("snapshot", stuck)


def test_a_rank_without_a_sign_of_life_is_lost():
    """As if its machine had lost power: no connection is closed."""
    with led(2, silent_after=1.0) as followers:
        os.kill(followers.children[1].pid, signal.SIGSTOP)

        def noticed() -> str:
            try:
                followers.check()
            except RunFailed as error:
                return str(error)
            return ""

        said = until(noticed, "the rank is lost")
        assert re.fullmatch(f"{WHO.format(1)} has given no sign of life for \\d+ s", said)


@pytest.mark.long
def test_a_rank_that_came_early_does_not_count_how_long_the_others_took(tmp_path: Path):
    """It looks for a sign of life every four seconds, so it has not seen one when it begins to follow."""
    with led(2, times="4 5 0", late=5.0) as followers:
        time.sleep(3)
        begun(followers, settings(), precise_policy(tied=True), tmp_path)


@pytest.mark.long
def test_a_rank_forgives_a_silence_of_rank_0_that_passes(tmp_path: Path):
    with led(2, times="0.2 2 4") as followers:
        heartbeats = followers.heartbeats
        heartbeats.every = 4.0
        time.sleep(1)
        heartbeats.every = 0.2
        time.sleep(8)
        begun(followers, settings(), precise_policy(tied=True), tmp_path)


def test_ranks_on_several_machines_do_not_meet_at_loopback():
    """Many machines have their own name at 127.0.1.1 in /etc/hosts."""
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: localhost is \S+ on this machine, .*LOCAL_WORLD_SIZE"):
        open_meeting(World(rank=0, size=2, address="localhost"))


def test_an_error_in_joining_is_not_hidden(monkeypatch: pytest.MonkeyPatch):
    def no_network(*_: object, **__: object) -> None:
        raise OSError("no such network")

    monkeypatch.setattr("tests.support.tba.a_rank.join", no_network)
    monkeypatch.setattr("tba.distributed.followers.END_PATIENCE", 0.1)
    with pytest.raises(OSError, match="no such network"), led(2):
        pass


def test_a_rank_that_lives_but_does_not_answer_has_a_deadline(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tba.distributed.process_group.PATIENCE", timedelta(seconds=5))
    monkeypatch.setattr("tba.distributed.followers.END_PATIENCE", 0.1)
    with led(2) as followers, pytest.raises(RunFailed, match=r"'begin' together: .*imed out"):
        followers.together("begin", lambda: "mine", [{"sleeps": 1000}, "", ""])


def test_a_rank_that_cannot_store_its_part_says_so_and_ends(tmp_path: Path):
    with led(2, parts=tmp_path / "a file" / "of a folder") as followers:
        learner = begun(followers, settings(), precise_policy(tied=True), tmp_path)
        (tmp_path / "a file").touch()
        with pytest.raises(RunFailed, match=f"^{WHO.format(1)}: .*[Nn]ot a directory"):
            learner.state(step=1, sync=1).others()


HANGS = """
import logging, time
from tests.support.tba.a_rank import led
logging.basicConfig()
with led(2, grace=0.1) as followers:
    followers.together("begin", lambda: time.sleep(1000), [{"error": "ValueError"}, "", ""])
"""


def test_a_trainer_that_waits_for_a_dead_rank_ends_and_says_what_that_died_of():
    ended = subprocess.run([sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert re.search(f"ERROR.*{WHO.format(1)}: ValueError: no room; rank 0 did not", ended.stderr)


STORES = """
import sys, time
from tba.errors import RunFailed
from tests.support.tba.a_rank import led
with led(2, grace=0.1) as followers:
    try:
        followers.together("begin", lambda: None, [{"error": "ValueError"}, "", ""])
    except RunFailed:
        time.sleep(3)
        print("stored", flush=True)
        followers.release()
        time.sleep(float(sys.argv[1]))
"""


@pytest.mark.long
@pytest.mark.parametrize(("leaves", "code"), [("0", 0), ("1000", 1)])
def test_a_trainer_that_knows_of_a_dead_rank_stores_what_it_has_before_it_ends(leaves, code):
    """It does not wait long for other ranks to leave with it."""
    ended = subprocess.run([sys.executable, "-c", STORES, leaves], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (code, "stored\n")


def stuck() -> None:
    """Fail like a process group that has lost a rank."""
    time.sleep(0.1)
    raise RuntimeError("connection closed by peer")
