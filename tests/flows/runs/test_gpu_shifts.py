"""Whole runs whose roles use one device one after the other. The CPU takes the place of the GPU: what a role leaves
there between its shifts is filled with NaN, and two roles that compute at once are noticed."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.tiny_models import tiny_folder
from flows.planning import create
from storage.maintenance.check import check
from storage.runs.run import Run
from tba.generation.transformers_generator import TransformersGenerator
from tba.models.policy import PolicyScorer
from tba.train.learner import Learner
from tests.support.devices import treat_cpu_as_gpu
from tests.support.flows.live_roles import learned, rows, run_all, settings

pytestmark = pytest.mark.slow
IN_STEP = {"sync.lag": 0, "sync.keep_versions": 3, "sampling.recent_share": 1.0}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture
def computing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Empty what is left on the device, and return a list of what computed in which thread. No thread may compute
    between two calls of another one with a model that is parked, which NaN would show, nor at the same time."""
    monkeypatch.setenv("TBA_LOCK_DIR", str(tmp_path / "locks"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    treat_cpu_as_gpu(monkeypatch)
    alone, journal = threading.Lock(), list[str]()

    @contextmanager
    def by_itself(what: str) -> Iterator[None]:
        assert alone.acquire(blocking=False), f"{what} begins while another role computes"
        try:
            journal.append(what)
            yield
        finally:
            alone.release()

    def watch(kind: type, method: str, what: str) -> None:
        original: Callable[..., Any] = getattr(kind, method)

        def watched(self: Any, *arguments: Any, **options: Any) -> Any:
            with by_itself(what):
                return original(self, *arguments, **options)

        monkeypatch.setattr(kind, method, watched)

    watch(Learner, "learn", "trainer")
    watch(TransformersGenerator, "step", "engine")
    watch(TransformersGenerator, "adopt", "engine")
    watch(PolicyScorer, "token_logps", "scorer")
    return journal


def test_roles_that_take_shifts_never_compute_at_the_same_time(policy: Path, tmp_path: Path, computing: list[str]):
    run = create.start(settings(policy, **{"model.gpu_shifts": True, "search.open_rounds": 2}), str(tmp_path), "shifts")
    run_all(run)
    assert check(run).problems == []
    assert {"trainer", "engine", "scorer"} == set(computing)
    assert computing.count("trainer") == 12
    assert rows(run, "select count(*) from trajectories where isnan(list_sum(behaviour_logps))") == [(0,)]


def in_step(policy: Path, root: Path, **changes: object) -> Run:
    run = create.start(settings(policy, **IN_STEP, **changes), str(root), "in-step")
    run_all(run)
    return run


@pytest.fixture
def without_shifts(policy: Path, tmp_path: Path) -> Run:
    return in_step(policy, tmp_path / "without")


def test_shifts_do_not_change_what_a_synchronous_run_learns(
    policy: Path, tmp_path: Path, without_shifts: Run, computing: list[str]
):
    run = in_step(policy, tmp_path / "with", **{"model.gpu_shifts": True})
    assert "scorer" in computing
    assert learned(run) == learned(without_shifts)
