"""Searcher and evaluator compute only within their shifts, and wait for versions only between them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.harness import fakes
from tba.errors import Damaged, Stopped
from tba.search.prompt_stream import PromptStream
from tba.search.searcher import Searcher
from tba.types import Request, Version
from tests.support.tba.evaluators import evaluator
from tests.support.tba.searchers import searcher_config

pytestmark = pytest.mark.usefixtures("looks_take_no_time")
V0, V1 = Version(0, 1), Version(1, 1)


class Shift:
    is_shared = True

    def __init__(self) -> None:
        self.is_on = False
        self.ended = 0

    def hold(self, *things: object) -> None: ...

    def begin(self) -> None:
        self.is_on = True

    def end(self) -> None:
        self.ended += self.is_on
        self.is_on = False


class Generator(fakes.Generator):
    """Fails if it is used outside of a shift. The first `broken` adoptions fail."""

    def __init__(self, shift: Shift, broken: int = 0):
        super().__init__()
        self.shift, self.broken = shift, broken

    def adopt(self, folder: Path, version: Version) -> None:
        assert self.shift.is_on
        if self.broken:
            self.broken -= 1
            raise Damaged("the engine cannot read it")
        super().adopt(folder, version)

    def submit(self, requests: Sequence[Request]) -> None:
        assert self.shift.is_on
        super().submit(requests)

    def step(self):
        assert self.shift.is_on
        return super().step()


def searcher(shift: Shift, generator: Generator, log: fakes.Log, *, rounds: int, **changes: object) -> Searcher:
    return Searcher(
        0,
        searcher_config(responses_per_prompt=2, prompts_per_round=2, **changes),
        stream=PromptStream(fakes.make_prompts(12), seed=7, searcher=0, searchers=1, shuffle=True),
        task=fakes.Task(),
        generator=generator,
        scorer=fakes.Scorer(),
        reference=V0,
        log=log,
        versions=fakes.Versions(V0, V1),
        lease=fakes.Lease(stop_when=lambda: len(log.shards) >= rounds),
        events=fakes.Events(),
        shift=shift,
    )


def test_a_shift_ends_when_all_responses_of_its_rounds_are_stored():
    shift, log = Shift(), fakes.Log()
    role = searcher(shift, Generator(shift), log, rounds=6, open_rounds=2)
    with pytest.raises(Stopped):
        role.run()
    assert len(log.shards) == 6 and shift.ended == 3, "two rounds a shift"


def test_a_version_that_cannot_be_loaded_does_not_keep_the_gpu_from_the_trainer():
    """The trainer has to publish another version, for which it needs the GPU."""
    shift = Shift()
    generator = Generator(shift, broken=1)
    role = searcher(shift, generator, log := fakes.Log(), rounds=1)
    looked: list[bool] = []
    newest = role.adoption.versions.newest
    role.adoption.versions.newest = lambda: looked.append(shift.is_on) or newest()  # pyright: ignore
    with pytest.raises(Stopped):
        role.run()
    assert generator.adopted == [V1] and len(log.shards) == 1
    assert looked[:2] == [False, False]


def test_an_evaluator_has_the_gpu_only_while_it_scores():
    role, evaluations = evaluator(V0, Version(20, 1))
    role.shift = shift = Shift()
    role.generator = Generator(shift)
    role.run(poll=0)
    assert len({score.version for score in evaluations.written}) == 2
    assert not shift.is_on and shift.ended == 2
