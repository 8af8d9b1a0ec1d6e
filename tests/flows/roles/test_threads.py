"""How many threads a role computes with."""

import os

import pytest

from flows.roles.threads import threads_of
from tba.config import Config
from tba.errors import ConfigError


@pytest.mark.parametrize(("cores", "searchers", "expected"), [(2, 1, 1), (8, 1, 4), (8, 2, 2), (4, 7, 1), (1, 1, 1)])
def test_roles_share_the_cores_that_this_process_may_use(
    cores: int, searchers: int, expected: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    shared = Config().replace({"model.threads": "shared", "search.searchers": searchers})
    assert threads_of(shared) == expected


def test_each_rank_of_the_trainer_has_its_part(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(10)))
    config = Config().replace({"model.threads": "shared", "training.ranks": 4})
    assert threads_of(config) == 2
    assert threads_of(config, 1) == 5, "the other three ranks are on other machines"


def test_where_the_system_does_not_tell_the_cores_of_a_process_all_cores_count(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert threads_of(Config().replace({"model.threads": "shared"})) == 3


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_a_number_is_the_number_of_threads(threads: int):
    assert threads_of(Config().replace({"model.threads": threads})) == threads


@pytest.mark.parametrize("threads", ["all", -1])
def test_anything_else_is_refused(threads: object):
    with pytest.raises(ConfigError, match=r"model\.threads.*" + str(threads)):
        Config().replace({"model.threads": threads})
