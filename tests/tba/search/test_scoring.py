from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.harness import fakes
from tba.errors import ConfigError, DataError
from tba.search.scoring import Scoring
from tba.types import Prompt, Response, Reward, Version


class Together:
    """Rewards a response by how many it has been asked about before."""

    name = "together"
    rewards_vary = False

    def __init__(self, missing: int = 0):
        self.missing = missing
        self.asked: list[list[str]] = []

    def source(self, split: str) -> str:
        return ""

    def prompts(self, *_: Any, **__: Any) -> list[Prompt]:
        return []

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        return self.rewards([(prompt, response)])[0]

    def rewards(self, asked: Sequence[tuple[Prompt, Response]]) -> list[Reward]:
        before = sum(map(len, self.asked))
        self.asked.append([prompt.prompt_id + response.text for prompt, response in asked])
        return [Reward(value=float(before + i)) for i in range(len(asked))][self.missing :]


def response(text: str, *, finished: bool = True) -> Response:
    return Response(
        tokens=tuple(map(ord, text)), logps=(-1.0,) * len(text), text=text, finished=finished, temperature=1.0,
        top_p=1.0, seed=0, version_start=Version(0, 1), version_end=Version(0, 1), generate_seconds=0.1,
    )  # fmt: skip


def values(scoring: Scoring, *groups: Sequence[Response]) -> list[list[float]]:
    found = scoring.rewards(fakes.make_prompts(len(groups)), groups)
    return [[reward.value for reward in group] for group in found]


def test_a_task_that_scores_together_is_asked_once_for_a_round():
    task = Together()
    assert values(Scoring(task), [response("a"), response("b")], [response("c")]) == [[0, 1], [2]]
    assert task.asked == [["p0a", "p0b", "p1c"]]


def test_a_reward_that_is_missing_is_noticed():
    with pytest.raises(DataError, match="task 'together' gave 1 rewards for 2 responses"):
        values(Scoring(Together(missing=1)), [response("a"), response("b")])


@pytest.mark.parametrize("given", [1.0, None])
def test_what_is_no_reward_is_refused_whether_it_is_given_alone_or_with_others(given: Any):
    class Alone(fakes.Task):
        def reward(self, prompt: Prompt, response: Response) -> Any:
            return given

    class InAll(Together):
        def rewards(self, asked: Sequence[tuple[Prompt, Response]]) -> Any:
            return [Reward(value=1.0), given]

    for task in (Alone(), InAll()):
        with pytest.raises(DataError, match=f"task '{task.name}': a reward must be a tba.types.Reward, got {given}"):
            values(Scoring(task), [response("a"), response("b")])


@pytest.mark.parametrize("remember", [0, 2, 100])
def test_each_response_gets_its_own_reward_whatever_is_remembered(remember: int):
    class ByText(Together):
        def rewards(self, asked: Sequence[tuple[Prompt, Response]]) -> list[Reward]:
            self.asked.append([])
            return [Reward(value=float(f"{prompt.prompt_id[1:]}{len(response.text)}")) for prompt, response in asked]

    scoring = Scoring(ByText(), remember=remember)
    for _ in range(3):
        found = values(scoring, [response("a"), response("bb"), response("a")], [response("a"), response("ccc")])
        assert found == [[1, 2, 1], [11, 13]]


def test_what_is_remembered_is_not_asked_for_again():
    task = Together()
    scoring = Scoring(task, remember=10)
    first = values(scoring, [response("a"), response("a"), response("b")], [response("a")])
    again = values(scoring, [response("b"), response("c")], [response("a")])
    assert (first, again) == ([[0, 0, 1], [2]], [[1, 3], [2]])
    assert task.asked == [["p0a", "p0b", "p1a"], ["p0c"]]


def test_a_response_that_was_cut_off_is_another_one():
    task = Together()
    scoring = Scoring(task, remember=10)
    assert values(scoring, [response("a"), response("a", finished=False)]) == [[0, 1]]


def test_what_was_asked_about_longest_ago_is_forgotten():
    task = Together()
    scoring = Scoring(task, remember=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        values(scoring, [response(text)])
    assert task.asked == [["p0a"], ["p0b"], ["p0c"], ["p0b"]]


def test_rewards_that_vary_are_not_remembered():
    task = Together()
    task.rewards_vary = True
    with pytest.raises(ConfigError, match=r"search.remembered_rewards must be 0 for task 'together', .* got 5"):
        Scoring(task, remember=5)
    assert values(Scoring(task), [response("a"), response("a")]) == [[0, 1]]
