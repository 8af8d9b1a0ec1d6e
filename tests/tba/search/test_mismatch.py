"""The mismatch: how far log-probabilities of the generator are from those of the trainer."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import fakes
from tba.types import Prompt, Version
from tests.support.tba.evaluators import evaluator, kinds


def test_the_mismatch_is_how_far_a_generators_log_probabilities_are_from_the_trainers():
    """The generator gives -0.5 and -0.1 for two tokens, the scorer -1 for each. Sampled responses are not compared."""
    role, evaluations = evaluator(Version(20, 1), samples=2)
    asked: list[tuple[Path, Version]] = []
    role.trainers_scorer = lambda folder, version: asked.append((folder, version)) or fakes.Scorer()
    role.run(poll=0)
    found = {s.metric: s.value for s in evaluations.written if s.version.number == 20}
    assert found["greedy_mismatch"] == pytest.approx(0.7)
    assert found["greedy_mismatch_max"] == pytest.approx(0.9)
    assert found["greedy_mismatch_response"] == pytest.approx(1.4)
    assert not [name for name in found if name.startswith("sampled_mismatch")]
    assert [version.number for _, version in asked] == [0, 20]
    assert asked[1][0] == role.versions.load(Version(20, 1))


@pytest.mark.parametrize(("most", "told"), [(1.3, ["mismatch-large"]), (1.5, []), (0.0, [])])
def test_a_mismatch_that_is_large_is_told_of_once(most: float, told: list[str]):
    """The mismatch is 1.4 nats per response, for both versions."""
    role, _ = evaluator(Version(20, 1))
    role.config = role.config.replace({"alarms.mismatch": most})
    role.trainers_scorer = lambda folder, version: fakes.Scorer()
    role.run(poll=0)
    assert kinds(role) == told


def test_tokens_that_the_policy_did_not_write_do_not_make_the_mismatch_smaller():
    """Each response has two turns of two tokens, with three tokens of the environment in between."""

    class Polite(fakes.Task):
        def reply(self, prompt: Prompt, turns: Sequence[str], tokenizer: Any) -> Sequence[int] | None:
            return [7, 8, 9] if len(turns) == 1 else None

    class Words:
        def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
            return " ".join(map(str, tokens))

    class Wide(fakes.Scorer):
        def token_logps(self, prompts: Any, responses: Any, *, temperature: float) -> list[list[tuple[float, ...]]]:
            return [[(-1.0,) * len(response.tokens) for response in row] for row in responses]

    role, evaluations = evaluator(Version(20, 1), task=Polite())
    assert isinstance(role.generator, fakes.Generator)
    role.generator.tokenizer = Words()
    role.trainers_scorer = lambda folder, version: Wide()
    role.run(poll=0)
    found = {s.metric: s.value for s in evaluations.written if s.version.number == 20}
    assert found["greedy_mismatch"] == pytest.approx(0.7)
    assert found["greedy_mismatch_response"] == pytest.approx(2.8)


def test_nothing_is_compared_where_the_generator_is_of_the_trainers_kind():
    role, evaluations = evaluator(Version(20, 1))
    role.run(poll=0)
    assert not [s.metric for s in evaluations.written if "mismatch" in s.metric]
