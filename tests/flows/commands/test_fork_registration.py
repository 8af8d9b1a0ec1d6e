"""Registration of forks: each fork gets a name of its own, also if processes fork at once or are killed meanwhile."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import product
from pathlib import Path

import pytest

from flows.commands import fork
from storage import layout
from storage.maintenance.compactor import compact
from storage.objects import records
from storage.objects.local_store import LocalStore
from storage.runs.forks import register
from storage.runs.run import Run
from tba.errors import ConfigError, Missing
from tests.support.storage.indexes import make_eligibility
from tests.support.storage.synthetic import SyntheticRun, make_run


class Killed(BaseException): ...


def before_write(patch: pytest.MonkeyPatch, number: int, happen: Callable[[], object]) -> None:
    """Call `happen` once, before the n-th write of a run.json or a registration of a fork."""
    left = [number]

    def watched(write: Callable[..., None]) -> Callable[..., None]:
        def watch(self: LocalStore, key: str, *data: bytes) -> None:
            if key == layout.RUN or key.startswith(layout.FORKS):
                left[0] -= 1
                if not left[0]:
                    happen()
            write(self, key, *data)

        return watch

    for name in ("create", "delete"):
        patch.setattr(LocalStore, name, watched(getattr(LocalStore, name)))


@pytest.mark.parametrize("one_is_killed", [False, True])
def test_an_existing_fork_is_registered_even_if_others_wanted_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_is_killed: bool
):
    parent = make_run(str(tmp_path))
    fork_parent = partial(fork.fork, parent, changes={"training.steps": "20"})

    def die() -> None:
        raise Killed

    def other(at: int, name: str) -> None:
        with monkeypatch.context() as patch, suppress(Killed, ConfigError):
            before_write(patch, at, die)
            fork_parent(8, name=name)
        if one_is_killed:
            raise Killed

    for one, two in product(range(1, 4), range(2, 5)):
        name = f"x-{one}-{two}"
        with monkeypatch.context() as patch, suppress(Killed, ConfigError):
            before_write(patch, one, partial(other, two, name))
            fork_parent(4, name=name)
        with suppress(Missing):
            assert is_registered(parent, Run.open(layout.run_url(parent.root, name)))
        with suppress(ConfigError):
            fork_parent(4, name=name)  # a fork that was cut short can be made again
        assert is_registered(parent, Run.open(layout.run_url(parent.root, name)))


def is_registered(parent: Run, run: Run) -> bool:
    registered = records.read_all(parent.store, layout.FORKS, "fork", "sync")
    return run.parent is not None and (run.name, run.parent.sync) in {(it["fork"], it["sync"]) for it in registered}


def test_a_fork_that_has_got_its_name_removes_what_others_registered_for_it(tmp_path: Path):
    parent = make_run(str(tmp_path))
    other = fork.fork(parent, 0, {}, name="mine-2").parent
    assert other
    for _ in range(2):
        register(parent, "mine", other)
    fork.fork(parent, 4, {}, name="mine")
    registered = records.read_all(parent.store, layout.FORKS, "fork", "sync")
    assert [(it["fork"], it["sync"]) for it in registered] == [("mine-2", 0), ("mine", 2)]


def test_of_two_that_fork_at_once_one_takes_the_next_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    parent = make_run(str(tmp_path))
    with monkeypatch.context() as patch:
        before_write(patch, 2, lambda: fork.fork(parent, 4, {}))
        assert fork.fork(parent, 4, {}).name == "first-4-2"
    registered = records.read_all(parent.store, layout.FORKS, "fork")
    assert {it["fork"] for it in registered} == {"first-4", "first-4-2"}


def test_a_fork_with_a_larger_index_is_refused_if_rows_were_given_up_before_it_was_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    parent = SyntheticRun(str(tmp_path), "first", **{"sampling.capacity": 4}).finish().run
    with monkeypatch.context() as patch:
        before_write(patch, 1, lambda: compact(parent, keep_checkpoints=1, drop_beyond=make_eligibility(4)))
        with pytest.raises(ConfigError, match=r"sampling.capacity must be at most 4, .* got 50"):
            fork.fork(parent, 8, {"sampling.capacity": "50", "training.steps": "20"})
    with pytest.raises(ConfigError, match=r"--set: sampling.evict must be 'oldest', because .* got 'worst'"):
        fork.fork(parent, 8, {"sampling.evict": "worst", "training.steps": "20"})
    with pytest.raises(ConfigError, match=r"--set: sampling.copies must be 'newest', because .* got 'all'"):
        fork.fork(parent, 8, {"sampling.copies": "all", "training.steps": "20"})
    with pytest.raises(ConfigError, match=r"--set: sampling.max_age must be None, because .* got 9"):
        fork.fork(parent, 8, {"sampling.max_age": "9", "training.steps": "20"})
    assert not parent.store.list(layout.FORKS)
    assert fork.fork(parent, 8, {"training.steps": "20"}).name == "first-8"
