"""If a rank of a trainer fails, dies or does not answer, all ranks end, and the error names the rank."""

import os
import re
import signal
import subprocess
import sys

import numpy as np
import pytest

from tba.errors import RunFailed
from tba.train.leader import Followers

RANK = [sys.executable, "-m", "tests.support.tba.a_rank", "3"]


@pytest.mark.parametrize(
    ("met", "raised", "says"),
    [
        pytest.param("RunFailed", RunFailed, "^no room$", marks=pytest.mark.long),
        ("ValueError", RunFailed, r"^rank 1 of the trainer \(pid \d+\): .*no room"),
    ],
)
def test_what_goes_wrong_at_another_rank_is_told_by_the_first(met, raised, says):
    with Followers(RANK, 2) as followers, pytest.raises(raised, match=says):
        followers.together("begin", lambda: "mine", [0, {"error": met}, ""])


def test_a_rank_that_is_killed_ends_what_the_others_do():
    with Followers(RANK, 3) as followers:
        os.kill(followers.all[1].process.pid, signal.SIGKILL)
        with pytest.raises(RunFailed, match=r"^rank 2 of the trainer \(pid \d+\) has died \(SIGKILL\)$"):
            followers.together("begin", stuck, [0, {}, ""])


def test_a_rank_that_does_not_read_is_killed(monkeypatch):
    monkeypatch.setattr("tba.train.leader.START", 0.5)
    deaf = [sys.executable, "-c", "import time; time.sleep(1000)"]
    with Followers(deaf, 2) as followers, pytest.raises(RunFailed, match=r"has died \(SIGKILL\)$"):
        followers.together("learn", lambda: "mine", numbers=[np.zeros(2**20)])


BREAKS = """
from tba.train.leader import follow
from tba.runtime.messages import take_pipes

class Learner:
    def state(self, **of):
        return self
    def save_optimizer(self, folder):
        raise OSError("no space")

follow(lambda said: Learner(), *take_pipes())
"""


def test_a_rank_that_cannot_store_its_part_says_so_and_ends():
    with Followers([sys.executable, "-c", BREAKS], 2) as followers:
        followers.together("begin", lambda: None)
        with pytest.raises(RunFailed, match=r"^rank 1 of the trainer \(pid \d+\): OSError: no space$"):
            followers.together("state", lambda: None, [1, 1, ""])
            assert followers.all[0].ended.wait(20)
            followers.order("learn")


HANGS = """
import logging, sys, time
from tba.train.leader import Followers
logging.basicConfig()
followers = Followers([sys.executable, "-c", sys.argv[1]], 2, grace=0.1)
time.sleep(1000)
"""
ENDS = """
import sys
from tba.runtime.messages import send
send(sys.stdout.buffer, {'error': 'ValueError', 'says': 'no room'})
"""


def test_a_trainer_that_waits_for_a_dead_rank_ends_and_says_what_that_died_of():
    ended = subprocess.run([sys.executable, "-c", HANGS, ENDS], capture_output=True, text=True, timeout=100)
    assert ended.returncode == 1
    assert re.search(r"ERROR.*rank 1 of the trainer \(pid \d+\): ValueError: no room; rank 0 did not", ended.stderr)


STORES = """
import sys, time
from tba.errors import RunFailed
from tba.train.leader import Followers
with Followers([sys.executable, "-c", sys.argv[1]], 2, grace=0.1) as followers:
    try:
        followers.answers()
    except RunFailed:
        time.sleep(3)
        print("stored", flush=True)
        followers.release()
        time.sleep(float(sys.argv[2]))
"""


@pytest.mark.long
@pytest.mark.parametrize(("leaves", "code"), [("0", 0), ("1000", 1)])
def test_a_trainer_that_knows_of_a_dead_rank_stores_what_it_has_before_it_ends(leaves, code):
    """It does not wait long for other ranks to leave with it."""
    ended = subprocess.run([sys.executable, "-c", STORES, ENDS, leaves], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (code, "stored\n")


def stuck() -> None:
    """Fail like a process group that has lost a rank."""
    raise RuntimeError("connection closed by peer")
