from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness import fakes
from benchmarks.harness.tiny_models import EOS_ID, tiny_llama, tiny_tokenizer
from tba.errors import DataError
from tba.generation.requests import generate
from tba.generation.transformers_generator import TransformersGenerator
from tba.interfaces import TakesTurns
from tba.models.policy import Policy, PolicyScorer
from tba.search import turns
from tba.seeds import turn_seed
from tba.types import Prompt, Request, Response, Version
from tests.support.tba.turn_examples import CHARACTERS, Echo

V0 = Version(0, 1)
MOST = 14


PROMPTS = Echo().prompts("train", [], tiny_tokenizer(CHARACTERS), max_tokens=9)
SEEDS = [[100 * i + j for j in range(12)] for i in range(len(PROMPTS))]


def policy() -> Policy:
    return Policy(tiny_llama(characters=CHARACTERS), tiny_tokenizer(CHARACTERS), torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    policy().snapshot().save(folder := tmp_path_factory.mktemp("policy"))
    return folder


def make_generator(folder: Path, *, batch: int = 64) -> TransformersGenerator:
    generator = TransformersGenerator(device="cpu", batch_responses=batch, max_response_tokens=MOST)
    generator.adopt(folder, V0)
    return generator


@pytest.fixture(scope="module")
def generator(folder: Path) -> TransformersGenerator:
    return make_generator(folder)


@pytest.fixture(scope="module")
def pairs(generator: TransformersGenerator) -> list[tuple[Prompt, Response]]:
    """Each prompt with each of its responses."""
    found = generate(turns.whole(Echo(), generator), PROMPTS, SEEDS, temperature=1.0)
    assert [[response.seed for response in group] for group in found] == SEEDS
    return [(prompt, response) for prompt, group in zip(PROMPTS, found, strict=True) for response in group]


def parts(response: Response) -> list[tuple[bool, tuple[int, ...]]]:
    """The tokens turn by turn, each turn with whether the policy wrote it."""
    mask = response.loss_mask or (True,) * len(response.tokens)
    pairs = zip(mask, response.tokens, strict=True)
    return [(own, tuple(token for _, token in part)) for own, part in groupby(pairs, key=lambda pair: pair[0])]


def without_times(response: Response) -> Response:
    return replace(response, generate_seconds=0.0)


def test_a_task_that_does_not_answer_gets_what_the_generator_gives(generator: TransformersGenerator):
    task = fakes.Task()
    assert isinstance(Echo(), TakesTurns) and not isinstance(task, TakesTurns)
    found = generate(turns.whole(task, generator), PROMPTS, SEEDS, temperature=0.8, top_p=0.9)
    expected = generate(generator, PROMPTS, SEEDS, temperature=0.8, top_p=0.9)
    assert [[*map(without_times, group)] for group in found] == [[*map(without_times, group)] for group in expected]
    assert {(it.loss_mask, it.turns) for group in found for it in group} == {(None, ())}


def test_each_turn_is_what_its_seed_yields_alone_after_everything_said_before(
    pairs: list[tuple[Prompt, Response]], folder: Path
):
    alone, task = make_generator(folder, batch=1), Echo()
    for prompt, response in pairs:
        said: list[Response] = []
        tokens, texts = prompt.tokens, []
        for n, (own, part) in enumerate(parts(response)):
            assert own == (n % 2 == 0)
            if own:
                room = MOST - (len(tokens) - len(prompt.tokens))
                ask = [replace(prompt, tokens=tokens)], [[turn_seed(response.seed, n // 2)]]
                [[turn]] = generate(alone, *ask, temperature=1.0, limits=[room])
                said.append(turn)
                assert part == turn.tokens
                texts.append(turn.text)
            else:
                reply = task.reply(prompt, texts, alone.tokenizer)
                assert reply is not None and part == tuple(reply)
                texts.append(f"?{texts[-1]}=")
            tokens += part
        assert response.turns == tuple(texts) and response.text == "".join(texts)
        logps = [logp for turn in said for logp in turn.logps]
        mask = response.loss_mask or (True,) * len(response.tokens)
        kept = [logp for logp, own in zip(response.logps, mask, strict=True) if own]
        assert kept == pytest.approx(logps, abs=1e-5)
        assert [logp for logp, own in zip(response.logps, mask, strict=True) if not own] == [0.0] * mask.count(False)
    assert {len(parts(response)) for _, response in pairs} == {1, 3, 5}


def test_a_response_ends_by_itself_or_at_the_limit_and_always_with_the_policy(pairs: list[tuple[Prompt, Response]]):
    task, tokenizer, seen = Echo(), tiny_tokenizer(CHARACTERS), set[str]()
    for prompt, response in pairs:
        turns_of = parts(response)
        assert len(response.tokens) <= MOST
        assert all(part[-1] == EOS_ID for own, part in turns_of[:-1] if own)
        own, last = turns_of[-1]
        assert own
        reply = task.reply(prompt, response.turns, tokenizer)
        if response.finished:
            assert last[-1] == EOS_ID and reply is None
            seen.add("finished")
        elif last[-1] == EOS_ID:
            assert reply is not None and len(response.tokens) + len(reply) >= MOST
            seen.add("no room for an answer and a turn")
        else:
            assert len(response.tokens) == MOST
            seen.add("cut off" if len(turns_of) > 1 else "cut off at once")
    assert len(seen) == 4, seen


def test_a_response_of_one_turn_has_no_mask(pairs: list[tuple[Prompt, Response]]):
    for _, response in pairs:
        assert (response.loss_mask is None) == (len(response.turns) == 1)


def test_what_is_batched_together_changes_nothing(pairs: list[tuple[Prompt, Response]], folder: Path):
    found = {}
    for i in reversed(range(len(PROMPTS))):
        for half in (SEEDS[i][::2], SEEDS[i][1::2]):
            small = make_generator(folder, batch=5)
            [group] = generate(turns.whole(Echo(), small), [PROMPTS[i]], [half], temperature=1.0)
            found |= {it.seed: (it.tokens, it.loss_mask, it.text, it.finished) for it in group}
    assert found == {it.seed: (it.tokens, it.loss_mask, it.text, it.finished) for _, it in pairs}


def test_the_log_probabilities_of_later_turns_are_given_all_that_was_said_before(
    pairs: list[tuple[Prompt, Response]],
):
    prompts, responses = zip(*pairs, strict=True)
    scored = PolicyScorer(policy(), V0).token_logps(prompts, [[it] for it in responses], temperature=1.0)
    for response, [logps] in zip(responses, scored, strict=True):
        assert turns.own(logps, response.loss_mask) == pytest.approx(response.logps, abs=1e-4)


def test_turns_have_seeds_of_their_own_and_the_first_has_the_responses():
    assert turn_seed(7, 0) == 7
    seeds = {turn_seed(seed, turn) for seed in range(50) for turn in range(50)}
    assert len(seeds) == 50 * 50 and all(0 <= seed < 2**63 for seed in seeds)


def test_a_response_names_the_versions_of_its_first_and_last_turn_and_adds_up_their_times():
    class Newer(fakes.Generator):
        """A version further at each turn."""

        def step(self) -> list[tuple[Request, Response]]:
            self.version = Version(len(self.settings) - 1, 1)
            return [(request, replace(response, generate_seconds=1.5)) for request, response in super().step()]

    class Twice(Echo):
        def reply(self, prompt: Prompt, turns: Sequence[str], tokenizer: Any) -> Sequence[int] | None:
            return [] if len(turns) < 5 else None

    generator = Newer()
    generator.tokenizer = tiny_tokenizer(CHARACTERS)
    [[response]] = generate(turns.whole(Twice(), generator), PROMPTS[:1], [[1]], temperature=1.0)
    assert (response.version_start, response.version_end) == (Version(0, 1), Version(2, 1))
    assert response.generate_seconds == 4.5 and len(response.tokens) == 6


@pytest.mark.parametrize("reply", ["0=", {"input_ids": [3, 4]}, [3.0]])
def test_an_answer_that_is_no_tokens_is_refused_by_prompt(folder: Path, reply: Any):
    class Wrong(Echo):
        def reply(self, prompt: Prompt, turns: Sequence[str], tokenizer: Any) -> Sequence[int] | None:
            return reply

    with pytest.raises(DataError, match="prompt 'train-0\\?': reply must be tokens or None, got"):
        generate(turns.whole(Wrong(), make_generator(folder)), PROMPTS[:1], SEEDS[:1], temperature=1.0)
