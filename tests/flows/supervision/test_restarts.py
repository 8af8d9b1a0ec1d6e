"""How often a role is started again, after which delay, and when the run is given up. The tests set the times."""

import pytest

from flows.supervision.restarts import LONGEST_DELAY, RestartBudget
from tba.config import LimitsConfig
from tba.errors import RunFailed


def budget(restarts: int, window: float = 600.0) -> RestartBudget:
    return RestartBudget(LimitsConfig(max_restarts=restarts, restart_window=window), first_delay=1.0)


def test_the_delay_before_a_restart_doubles_with_each_end_up_to_a_bound():
    restarts = budget(9)
    delays = [restarts.spend("trainer", "it failed", now=100.0) for _ in range(9)]
    assert delays == [1, 2, 4, 8, 16, 32, LONGEST_DELAY, LONGEST_DELAY, LONGEST_DELAY]
    assert restarts.not_before == 100 + LONGEST_DELAY


def test_a_role_may_be_started_at_once_before_it_has_ended():
    assert budget(1).not_before == 0


def test_one_end_more_than_allowed_within_the_window_gives_the_run_up_and_says_how_it_ended():
    restarts = budget(2)
    for moment in (0.0, 100.0):
        restarts.spend("trainer", "it failed", moment)
    with pytest.raises(RunFailed, match="trainer ended 3 times within 600 s, the last time by SIGKILL"):
        restarts.spend("trainer", "by SIGKILL", 600.0)


def test_ends_before_the_window_are_forgotten_if_the_role_makes_progress():
    restarts = budget(2)
    for turn in range(9):
        restarts.note_progress(turn)
        assert restarts.spend("trainer", "it failed", 1000.0 * turn) == 1


@pytest.mark.parametrize("progress", [[], [5.0, 5.0, 5.0], [5.0, 4.0, 3.0]])
def test_as_many_ends_without_getting_further_give_the_run_up_however_slowly_they_come(progress: list[float]):
    restarts = budget(2)
    restarts.note_progress(5.0)
    moments = (0.0, 1000.0, 2000.0)
    with pytest.raises(RunFailed, match="ended 3 times without making progress"):
        for moment, how_far in zip(moments, progress or [0.0] * 3, strict=True):
            restarts.note_progress(how_far)
            restarts.spend("trainer", "it failed", moment)


def test_two_lives_in_a_row_without_a_lease_give_the_run_up():
    restarts = budget(9)
    restarts.spend("searcher-000", "it was lost", 0.0, seconds_without_lease=60.0)
    with pytest.raises(RunFailed, match=r"searcher-000 took no lease in 60 s, twice; it was lost"):
        restarts.spend("searcher-000", "it was lost", 100.0, seconds_without_lease=60.0)


def test_a_life_with_a_lease_makes_up_for_an_earlier_one_without():
    restarts = budget(9)
    for moment in range(0, 500, 100):
        restarts.spend("searcher-000", "it was lost", moment, seconds_without_lease=60.0)
        restarts.note_lease()
