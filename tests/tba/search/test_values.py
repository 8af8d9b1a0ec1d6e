"""Steps of responses, and the values of the states between them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import fakes
from benchmarks.harness.tiny_models import EOS, tiny_llama, tiny_tokenizer
from tba.config import SearchConfig, TaskConfig
from tba.errors import ConfigError, Stopped
from tba.generation.requests import generate
from tba.generation.transformers_generator import TransformersGenerator
from tba.interfaces import SplitsIntoSteps
from tba.models.policy import Policy
from tba.search.prompt_stream import PromptStream
from tba.search.scoring import Scoring
from tba.search.searcher import Searcher
from tba.search.values import Steps, estimate
from tba.seeds import continuation_seed
from tba.tasks.registry import get_task
from tba.tasks.steps import line_ends, step_ends
from tba.types import Prompt, Request, Response, Reward, Trajectory, Version
from tests.support.tba.searchers import searcher_config
from tests.support.tba.turn_examples import Echo
from tests.support.tba.value_examples import CHARACTERS, text_of

V0 = Version(0, 1)
MOST, SAMPLES = 8, 3


class Ones:
    """Rewards ones, and less in truncated responses. Two characters are a step."""

    name = "ones"

    def __init__(self, config: TaskConfig | None = None):
        pass

    def source(self, split: str) -> str:
        return ""

    def prompts(self, split: str, rows: Sequence[Any], tokenizer: Any, *, max_tokens: int) -> list[Prompt]:
        texts = ("0?", "1?", "00?", "01?", "10?", "11?", "000?", "001?")
        return [Prompt(prompt_id=f"{split}-{it}", text=it, tokens=tuple(tokenizer(it).input_ids)) for it in texts]

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        return Reward(value=response.text.count("1") - 0.25 * (not response.finished))

    def step_ends(self, text: str) -> Sequence[int]:
        return range(2, len(text), 2)


# --- steps ------------------------------------------------------------------------------------------------------------


def split(text: str, places: Sequence[int]) -> list[str]:
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True) if start < end]


def test_lines_are_steps_with_the_blank_lines_and_the_space_after_them():
    text = "\nFirst.\n\n  Then this.\nAt last"
    assert split(text, line_ends(text)) == ["\nFirst.\n\n  ", "Then this.\n", "At last"]
    assert line_ends("one line") == line_ends("") == line_ends("\n\n") == []


def test_in_gsm8k_the_line_of_the_answer_belongs_to_the_step_before_it():
    text = "\n3 + 4 = 7\nSo it is 7.\n#### 7\nand on"
    task = get_task("gsm8k")
    assert isinstance(task, SplitsIntoSteps)
    assert split(text, task.step_ends(text)) == ["\n3 + 4 = 7\n", "So it is 7.\n#### 7\n", "and on"]


def test_in_math_sentences_and_lines_are_steps_and_no_formula_is_divided():
    text = (
        "Let $x. y$ be 3.5 units. Is it? Yes!\n\n1. We have\n\\[ a = b. \n c \\]\nand \\( d. e \\) too.\n"
        "Thus $$f.\ng$$ holds. \\boxed{5}"
    )
    task = get_task("math")
    assert isinstance(task, SplitsIntoSteps)
    assert split(text, task.step_ends(text)) == [
        "Let $x. y$ be 3.5 units. ", "Is it? ", "Yes!\n\n", "1. We have\n", "\\[ a = b. \n c \\]\n",
        "and \\( d. e \\) too.\n", "Thus $$f.\ng$$ holds. ", "\\boxed{5}",
    ]  # fmt: skip


def test_in_quickstart_each_digit_is_a_step_and_the_end_token_part_of_the_last():
    tokenizer = tiny_tokenizer()
    tokens = tuple(tokenizer(f"1234{EOS}").input_ids)
    assert step_ends(get_task("quickstart"), tokenizer, said(tokens, "1234")) == (1, 2, 3, 5)


def said(tokens: Sequence[int], text: str) -> Response:
    return Response(
        tokens=tuple(tokens), logps=(-1.0,) * len(tokens), text=text, finished=True, temperature=1.0, top_p=1.0, seed=0,
        version_start=V0, version_end=V0, generate_seconds=0.0,
    )  # fmt: skip


class Pieces:
    """A tokenizer whose tokens are these texts; an empty one is special."""

    def __init__(self, *texts: str):
        self.texts = texts

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(self.texts[token] for token in tokens)


@pytest.mark.parametrize(
    ("texts", "ends"),
    [
        (("ab", "\n", "cd", ""), (2, 4)),
        (("ab\nc", "d", ""), (1, 3)),  # a token that reaches beyond the end of the step
        (("a", "b", "\n", "\n", "c", "\nd", ""), (4, 6, 7)),
        (("ab", "\ncd\nef"), (2,)),  # several ends in the last token
        (("x", "\na\nb\nc", "d"), (2, 3)),  # several ends in another token
        (("ab", "\n", ""), (3,)),  # at the end of the text
        (("", "a\n", "", "b", ""), (2, 5)),
        (("",), (1,)),
    ],
)
def test_a_step_ends_with_the_first_token_that_reaches_its_end(texts: Sequence[str], ends: tuple[int, ...]):
    assert step_ends(fakes.Task(), Pieces(*texts), said(range(len(texts)), "".join(texts))) == ends


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    Policy(tiny_llama(characters=CHARACTERS), tiny_tokenizer(CHARACTERS), torch.device("cpu")).snapshot().save(folder)
    return folder


class Counting(TransformersGenerator):
    """Records the prompts of each call of `submit`."""

    def submit(self, requests: Sequence[Request]) -> None:
        self.asked = [*getattr(self, "asked", []), list({id(it.prompt): it.prompt for it in requests}.values())]
        super().submit(requests)


def make_generator(folder: Path, *, batch: int = 64) -> Counting:
    generator = Counting(device="cpu", batch_responses=batch, max_response_tokens=MOST)
    generator.adopt(folder, V0)
    return generator


def search(
    folder: Path, *, rounds: int = 2, stored: Sequence[Sequence[Trajectory]] = (), batch: int = 64, **changes: Any
) -> fakes.Log:
    """Return the log of a searcher that continues after the stored rounds."""
    generator, log, task = make_generator(folder, batch=batch), fakes.Log(dict(enumerate(stored))), Ones()
    options = {
        "responses_per_prompt": 6, "prompts_per_round": 3, "temperature": 1.3, "top_p": 0.95,
        "max_response_tokens": MOST, "value_samples": SAMPLES, **changes,
    }  # fmt: skip
    versions = fakes.Versions(V0)
    versions.load = lambda version: folder  # pyright: ignore[reportAttributeAccessIssue]
    role = Searcher(
        0,
        searcher_config(**options),
        stream=PromptStream(
            task.prompts("train", [], tiny_tokenizer(CHARACTERS), max_tokens=9),
            seed=7, searcher=0, searchers=1, shuffle=True,
        ),
        task=task,
        generator=generator,
        scorer=Scorer(),
        reference=V0,
        log=log,
        versions=versions,
        lease=fakes.Lease(stop_when=lambda: len(log.shards) >= rounds),
        events=fakes.Events(),
    )  # fmt: skip
    with pytest.raises(Stopped):
        role.run()
    return log


class Scorer(fakes.Scorer):
    def token_logps(self, prompts: Any, responses: Sequence[Sequence[Response]], **_: Any) -> list[list[Any]]:
        return [[(-1.0,) * len(it.tokens) for it in group] for group in responses]


@pytest.fixture(scope="module")
def rounds(folder: Path) -> dict[int, list[Trajectory]]:
    return search(folder).shards


def states(row: Trajectory) -> list[tuple[int, ...]]:
    """Return the tokens before each step."""
    assert row.step_ends is not None
    return [row.response_tokens[:tokens] for tokens in (0, *row.step_ends[:-1])]


def test_each_response_has_a_value_before_each_of_its_steps(rounds: dict[int, list[Trajectory]]):
    rows = [row for shard in rounds.values() for row in shard]
    for row in rows:
        assert row.step_ends is not None and row.step_values is not None
        written = [len(text_of(row.response_tokens[:end])) for end in range(row.length + 1)]  # without special tokens
        ends = [written.index(place) for place in range(2, len(row.response), 2)]
        assert row.step_ends == (*ends, row.length) and len(row.step_values) == len(row.step_ends)
    assert len({row.step_ends for row in rows}) > 10 and len({row.step_values for row in rows}) > 10


def test_a_value_is_what_continuations_of_the_state_earn_on_average(rounds: dict[int, list[Trajectory]], folder: Path):
    """Each state is continued alone here, with the seeds of the first response that begins with it."""
    task, alone = Ones(), make_generator(folder, batch=1)
    found: dict[tuple[str, tuple[int, ...]], float] = {}
    for row in rounds[0]:
        for prefix, value in zip(states(row), row.step_values or (), strict=True):
            if (key := (row.group_id, prefix)) not in found:
                prompt = Prompt(prompt_id=row.prompt_id, text=row.prompt, tokens=row.prompt_tokens)
                [continued] = generate(
                    alone,
                    [replace(prompt, tokens=row.prompt_tokens + prefix)],
                    [[continuation_seed(row.seed, len(prefix), n) for n in range(SAMPLES)]],
                    temperature=1.3, top_p=0.95, limits=[MOST - len(prefix)],
                )  # fmt: skip
                whole = [replace(it, text=text_of(prefix) + it.text) for it in continued]
                earned = [task.reward(prompt, it).value for it in whole]
                found[key] = sum(earned) / SAMPLES
            assert value == pytest.approx(found[key])
    assert len(found) < sum(len(states(row)) for row in rounds[0])


def test_states_that_are_alike_are_continued_once_and_all_of_a_round_together(folder: Path):
    generator, task = make_generator(folder), Ones()
    prompts = task.prompts("train", [], generator.tokenizer, max_tokens=9)[:4]
    config = SearchConfig(max_response_tokens=MOST, value_samples=2, value_steps=3)
    responses = generate(generator, prompts, [list(range(6))] * 4, temperature=1.0)
    rewards = [[task.reward(prompt, it) for it in group] for prompt, group in zip(prompts, responses, strict=True)]
    found = estimate(Scoring(task), generator, config, prompts, responses, rewards)
    assert len(generator.asked) == 2
    asked = [(state.prompt_id, state.tokens) for state in generator.asked[1]]
    expected = {
        (prompt.prompt_id, prompt.tokens + response.tokens[:tokens])
        for prompt, group, steps in zip(prompts, responses, found, strict=True)
        for response, (ends, _) in zip(group, steps, strict=True)
        for tokens in (0, *ends[:-1])[:3]
    }
    assert len(asked) == len(expected) and set(asked) == expected


@pytest.mark.parametrize("most", [1, 2])
def test_states_beyond_the_first_so_many_have_the_reward_of_the_response(
    rounds: dict[int, list[Trajectory]], folder: Path, most: int
):
    beyond = 0
    for row, whole in zip(search(folder, value_steps=most).shards[0], rounds[0], strict=True):
        assert row.step_ends == whole.step_ends and row.step_values and whole.step_values
        assert row.step_values[:most] == whole.step_values[:most]
        assert set(row.step_values[most:]) <= {row.reward}
        beyond += len(row.step_values[most:])
    assert beyond


def test_with_0_every_state_is_estimated(rounds: dict[int, list[Trajectory]], folder: Path):
    found = search(folder, value_steps=0, rounds=1).shards[0]
    assert [row.step_values for row in found] == [row.step_values for row in rounds[0]]


def test_a_searcher_that_starts_again_finds_the_same_values_however_they_are_batched(
    rounds: dict[int, list[Trajectory]], folder: Path
):
    again = search(folder, stored=[rounds[0]], batch=7).shards
    assert again[0] == rounds[0] and sorted(again) == [0, 1]
    assert [row.step_ends for row in again[1]] == [row.step_ends for row in rounds[1]]
    assert [row.step_values for row in again[1]] == [row.step_values for row in rounds[1]]


def test_values_change_nothing_else_and_without_samples_there_are_none(
    rounds: dict[int, list[Trajectory]], folder: Path
):
    for row, whole in zip(search(folder, value_samples=0, rounds=1).shards[0], rounds[0], strict=True):
        assert (row.step_ends, row.step_values) == (None, None)
        same = {"created_at": row.created_at, "generate_seconds": row.generate_seconds}
        assert replace(whole, step_ends=None, step_values=None, **same) == row


def test_seeds_of_continuations_are_their_own():
    seeds = {continuation_seed(seed, tokens, n) for seed in range(20) for tokens in range(20) for n in range(20)}
    assert len(seeds) == 8000 and all(20 <= seed < 2**63 for seed in seeds)


def test_a_task_that_answers_back_is_refused(folder: Path):
    with pytest.raises(ConfigError, match=r"search\.value_samples must be 0 for task 'echo', which answers back"):
        Searcher(
            0, searcher_config(value_samples=9), stream=PromptStream([], seed=7, searcher=0, searchers=1,
            shuffle=True), task=Echo(), generator=fakes.Generator(), scorer=fakes.Scorer(),
            reference=V0, log=fakes.Log(), versions=fakes.Versions(V0), lease=fakes.Lease(), events=fakes.Events(),
        )  # fmt: skip


def test_a_response_of_one_step_has_the_value_of_its_prompt(folder: Path):
    generator = make_generator(folder)
    prompts = Ones().prompts("train", [], generator.tokenizer, max_tokens=9)[:2]
    responses = generate(generator, prompts, [[1, 2], [3]], temperature=1.0)
    rewards = [[Reward(value=0.0)] * len(group) for group in responses]
    config = SearchConfig(max_response_tokens=MOST, value_samples=2)
    found = estimate(Scoring(fakes.Task()), generator, config, prompts, responses, rewards)
    lengths = [[len(it.tokens) for it in group] for group in responses]
    assert found == [[Steps((n,), (0.0,)) for n in group] for group in lengths]


def test_values_are_the_same_in_pieces_and_between_those_is_told_how_far_they_are(folder: Path):
    generator, task = make_generator(folder), Ones()
    prompts = task.prompts("train", [], generator.tokenizer, max_tokens=9)[:2]
    responses = generate(generator, prompts, [[1, 2], [3, 4]], temperature=1.0)
    rewards = [[Reward(value=0.0)] * len(group) for group in responses]
    told: list[tuple[int, int]] = []

    def estimated(batch: int) -> list[list[Steps]]:
        config = SearchConfig(max_response_tokens=MOST, value_samples=2, batch_responses=batch)
        return estimate(
            Scoring(task), generator, config, prompts, responses, rewards, tell=lambda *far: told.append(far)
        )

    whole = estimated(512)
    assert told == []
    assert estimated(4) == whole
    states = told[0][1]
    assert told == [(done, states) for done in range(2, states, 2)]
