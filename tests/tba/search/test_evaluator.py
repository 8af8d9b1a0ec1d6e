"""The evaluator: which versions it scores, with which responses, and what the task measures of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import fakes
from tba.errors import Damaged, DataError, Missing, Stopped
from tba.types import Prompt, Response, Reward, Version
from tests.support.tba.evaluators import Evaluations, evaluator, kinds

V0 = Version(0, 1)


def scored(evaluations: Evaluations) -> list[int]:
    return [s.version.number for s in evaluations.written if s.metric == "greedy"]


def test_the_first_the_last_and_every_nth_version_are_scored_and_no_other():
    role, evaluations = evaluator(*(Version(n, 1) for n in (0, 1, 4, 9, 12, 15, 19, 20)), every=10)
    role.run(poll=0)
    assert sorted({s.version.number for s in evaluations.written}) == [0, 12, 20]


def test_the_start_is_scored_even_when_training_is_far_ahead():
    role, evaluations = evaluator(Version(20, 1))
    role.run(poll=0)
    assert [s.version.number for s in evaluations.written if s.metric == "greedy"] == [0, 20]


def test_scores_are_means_over_all_responses_of_all_prompts():
    role, evaluations = evaluator(Version(20, 1))
    role.run(poll=0)
    greedy, sampled = evaluations.written[:2]
    assert (greedy.metric, greedy.n, greedy.value) == ("greedy", 5, 0.0)  # the fake is right for odd seeds only
    assert (sampled.metric, sampled.n) == ("sampled", 10)
    assert sampled.value == pytest.approx(round(sampled.value * 10) / 10) and 0 < sampled.value < 1


def test_a_restarted_evaluator_scores_nothing_twice():
    role, evaluations = evaluator(Version(0, 1), Version(20, 1))
    role.run(poll=0)
    before = list(evaluations.written)
    role.run(poll=0)
    assert evaluations.written == before


def test_without_samples_only_the_greedy_score_is_kept():
    role, evaluations = evaluator(Version(20, 1), samples=0)
    role.run(poll=0)
    assert not [s.metric for s in evaluations.written if "mismatch" in s.metric]


@pytest.mark.parametrize(("examples", "kept"), [(0, 0), (3, 3), (10, 5)])
@pytest.mark.parametrize("batch", [2, 512])
def test_the_first_greedy_responses_of_each_version_are_kept_with_their_rewards(examples: int, kept: int, batch: int):
    """They are the same for any number of pieces in which they were generated, and none of them was sampled."""

    class Graded(fakes.Task):
        def reward(self, prompt: Prompt, response: Response) -> Reward:
            return Reward(value=float(prompt.answer) + response.temperature)

    role, evaluations = evaluator(Version(20, 1), task=Graded(), examples=examples)
    role.config = role.config.replace({"search.batch_responses": batch})
    role.run(poll=0)
    assert [(it.version, it.step, it.prompt_id) for it in evaluations.examples] == [
        (version, role.versions.step(version), f"p{i}") for version in (V0, Version(20, 1)) for i in range(kept)
    ]
    prompts = {it.prompt_id: it for it in role.prompts}
    for it in evaluations.examples:
        prompt = prompts[it.prompt_id]
        assert (it.prompt, it.answer, it.reward) == (prompt.text, prompt.answer, float(prompt.answer))
        assert it.response == "wrong"


def test_greedy_is_at_temperature_zero_and_sampled_at_that_of_search():
    role, _ = evaluator(Version(20, 1))
    role.run(poll=0)
    assert isinstance(role.generator, fakes.Generator)
    assert role.generator.settings == [(0.0, 1.0), (0.7, 0.9)] * 2


@pytest.mark.parametrize(
    ("own", "sampled"), [({"temperature": 0.35}, (0.35, 0.9)), ({"top_p": 0.5}, (0.7, 0.5)), ({}, (0.7, 0.9))]
)
def test_evaluation_samples_with_settings_of_its_own_where_it_has_them_and_stores_them(
    own: dict[str, Any], sampled: tuple[float, float]
):
    role, evaluations = evaluator(Version(20, 1), pass_at=[2], **own)
    role.run(poll=0)
    assert isinstance(role.generator, fakes.Generator)
    assert role.generator.settings == [(0.0, 1.0), sampled] * 2
    assert {(s.metric, s.temperature, s.top_p) for s in evaluations.written} == {
        ("greedy", 0.0, 1.0), ("sampled", *sampled), ("pass@2", *sampled),
    }  # fmt: skip


def test_a_stop_is_heard_between_the_pieces_of_many_samples():
    role, evaluations = evaluator(Version(20, 1), samples=300)
    role.lease = lease = fakes.Lease(stop_at=5)  # one look for a version, one piece of greedy, two of samples
    with pytest.raises(Stopped):
        role.run(poll=0)
    assert isinstance(role.generator, fakes.Generator)
    assert len(role.generator.settings) == 3
    assert lease.told[-1] == "sampled of version 000000-a0001: 1 of 5 prompts"
    assert evaluations.written == []


def test_of_the_versions_there_are_those_that_are_kept_are_scored():
    """Pruning keeps every tenth version. So 10 is scored, and 12 is not, although it is the newest for a moment."""
    role, evaluations = evaluator(*(Version(n, 1) for n in (0, 9, 10, 12, 14, 19, 20)), every=10)
    versions = role.versions
    assert isinstance(versions, fakes.Versions)
    newest, versions.newest = versions.newest, lambda: (newest(), newest())[1]  # two versions come between two looks
    role.run(poll=0)
    assert scored(evaluations) == [0, 10, 20]


def test_a_version_pruned_before_its_turn_is_passed_over_and_reported():
    role, evaluations = evaluator(*(Version(n, 1) for n in (0, 12, 13, 20)), broken={Version(12, 1): Missing("gone")})
    role.run(poll=0)
    assert scored(evaluations) == [0, 13, 20]
    assert kinds(role) == ["version-passed-over"]


def test_a_version_pruned_while_it_is_scored_is_scored():
    role, evaluations = evaluator(*(Version(n, 1) for n in (0, 12, 20)))
    load, steps = role.versions.load, dict[Version, bool]()

    def load_once(version: Version) -> Path:
        steps[version] = True
        return load(version)

    def step(version: Version) -> int:
        if version in steps:
            raise Missing("pruned while it was scored")
        return 2 * version.number

    role.versions.load, role.versions.step = load_once, step
    role.run(poll=0)
    assert [(s.version.number, s.step) for s in evaluations.written if s.metric == "sampled"] == [
        (0, 0), (12, 24), (20, 40),
    ]  # fmt: skip


def test_a_damaged_version_is_refused_once_and_the_next_one_scored():
    role, evaluations = evaluator(
        *(Version(n, 1) for n in (0, 10, 10, 10, 10, 11, 20)), broken={Version(10, 1): Damaged("model.safetensors")}
    )
    role.run(poll=0)
    assert scored(evaluations) == [0, 11, 20]
    assert kinds(role) == ["version-refused"]


def test_a_damaged_last_version_is_an_error_since_no_other_will_come():
    role, evaluations = evaluator(Version(20, 1), broken={Version(20, 1): Damaged("model.safetensors")})
    with pytest.raises(Damaged):
        role.run(poll=0)
    assert scored(evaluations) == [0]


def test_between_two_looks_the_evaluator_sleeps_whatever_it_found(monkeypatch):
    slept = []
    monkeypatch.setattr("tba.search.evaluator.time.sleep", slept.append)
    role, _ = evaluator(*(Version(n, 1) for n in (0, 10, 10, 10, 20)), broken={Version(10, 1): Missing("unreadable")})
    role.run(poll=1.5)
    assert slept == [1.5] * 3


# --- Measures of the task ---


class Measured(fakes.Task):
    """A task with its own measures, which records the arguments of the calls."""

    needs_reference = True

    def __init__(self) -> None:
        self.seen: list[tuple[list[tuple[Prompt, Response]], list[Reward], list[Sequence[float]] | None]] = []

    def measures(
        self,
        asked: Sequence[tuple[Prompt, Response]],
        rewards: Sequence[Reward],
        ref_logps: Sequence[Sequence[float]] | None,
    ) -> dict[str, float]:
        self.seen.append((list(asked), list(rewards), None if ref_logps is None else list(ref_logps)))
        return {"kl": 0.25 * len(asked)}


def test_what_a_task_measures_of_each_set_is_written_beside_its_reward():
    role, evaluations = evaluator(V0, Version(20, 1), task=Measured(), reference=fakes.Scorer())
    role.run(poll=0)
    of_start = [(s.metric, s.n, s.value) for s in evaluations.written if s.version == V0]
    assert [(metric, n) for metric, n, _ in of_start] == [
        ("greedy", 5), ("greedy_kl", 5), ("sampled", 10), ("sampled_kl", 10),
    ]  # fmt: skip
    assert [value for metric, _, value in of_start if metric.endswith("_kl")] == [1.25, 2.5]


def test_a_measure_that_fails_is_told_by_its_task():
    task = Measured()
    task.seen = None  # pyright: ignore[reportAttributeAccessIssue]
    role, _ = evaluator(Version(20, 1), task=task, reference=fakes.Scorer())
    with pytest.raises(DataError, match=r"task 'fake': measures raised AttributeError: .*test_evaluator\.py, line"):
        role.run(poll=0)


class Telling(fakes.Scorer):
    """A scorer whose log-probabilities identify the response."""

    def token_logps(
        self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Response]], *, temperature: float
    ) -> list[list[tuple[float, ...]]]:
        return [[told(p, r) for r in row] for p, row in zip(prompts, responses, strict=True)]


def told(prompt: Prompt, response: Response) -> tuple[float, float]:
    return float(prompt.answer), 1.0 + response.seed


@pytest.mark.parametrize("batch", [2, 512])
def test_measures_are_of_all_responses_at_once_with_their_rewards_and_log_probabilities_under_the_reference(batch: int):
    """They are in order, for any number of pieces in which they were generated."""
    task = Measured()
    role, _ = evaluator(Version(20, 1), task=task, reference=Telling())
    role.config = role.config.replace({"search.batch_responses": batch})
    role.run(poll=0)
    assert [[p.prompt_id for p, _ in asked] for asked, _, _ in task.seen] == [
        [f"p{i}" for i in range(5)],
        [f"p{i}" for i in range(5) for _ in range(2)],
    ] * 2
    for asked, rewards, ref_logps in task.seen:
        assert [reward.value for reward in rewards] == [float(r.text == p.answer) for p, r in asked]
        assert ref_logps == [told(p, r) for p, r in asked]


class Answered(fakes.Generator):
    """A generator whose responses end with a token that the policy did not write."""

    def make_response(self, prompt: Prompt, seed: int, temperature: float) -> Response:
        return replace(super().make_response(prompt, seed, temperature), loss_mask=(True, False))


def test_what_the_policy_did_not_write_counts_nothing_under_the_reference_either():
    task = Measured()
    role, _ = evaluator(Version(20, 1), task=task, reference=Telling(), samples=0)
    role.generator = Answered()
    role.run(poll=0)
    for asked, _, ref_logps in task.seen:
        assert ref_logps == [(told(p, r)[0], 0.0) for p, r in asked]


def test_the_reference_is_asked_at_the_temperature_of_each_sets_own_log_probabilities():
    reference = fakes.Scorer()
    role, _ = evaluator(Version(20, 1), task=Measured(), reference=reference)
    role.run(poll=0)
    assert reference.temperatures == [1.0, 0.7] * 2


def test_without_a_reference_a_task_measures_without_it():
    task = Measured()
    task.needs_reference = False
    role, _ = evaluator(Version(20, 1), task=task)
    role.run(poll=0)
    assert {ref_logps is None for _, _, ref_logps in task.seen} == {True}
