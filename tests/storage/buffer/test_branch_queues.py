"""The queues of all branches together."""

import numpy as np
import pytest

from storage.buffer.branch_queues import BranchQueues, turns_table
from tba.errors import Damaged


def make_queues(slots: int = 3) -> BranchQueues:
    return BranchQueues(seed=0, slots=slots)


def test_every_prompt_is_prioritised_and_those_of_the_newest_record_are_recent():
    queues = make_queues()
    queues.admit(np.array([0, 1]), 2)
    queues.admit(np.array([1, 2]), 3)
    turns = queues.turns(5)
    assert sorted(turns["prioritised"]) == [0, 1, 2]
    assert set(turns["recent"]) == {1, 2} and len(turns["recent"]) == 3
    assert turns == queues.turns(5), "turns follow from the seed and the step"
    table = turns_table(turns, ["a", "b", "c"]).to_pylist()
    assert {row["prompt_id"] for row in table if row["branch"] == "recent"} == {"b", "c"}


def test_a_prompt_that_a_branch_has_taken_waits_for_the_others_of_its_branch():
    queues = make_queues(slots=2)
    queues.admit(np.array([0, 1, 2]), 3)
    queues.mark_used([("prioritised", 1)])
    turns = queues.turns(1)
    assert sorted(turns["prioritised"]) == [0, 2]
    used = {(row["branch"], row["prompt_id"]) for row in queues.table(["a", "b", "c"]).to_pylist() if row["used"]}
    assert used == {("prioritised", "b")}


def test_queues_are_restored_only_after_the_same_records():
    queues, again, other = make_queues(), make_queues(), make_queues()
    for made in (queues, again):
        made.admit(np.array([0, 1]), 2)
    other.admit(np.array([0]), 1)
    queues.mark_used([("recent", 1), ("prioritised", 0)])
    again.restore(queues.state())
    assert again.state() == queues.state()
    with pytest.raises(Damaged, match="cannot be restored"):
        other.restore(queues.state())
