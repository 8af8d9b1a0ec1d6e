"""The generator based on transformers: its tokens and log-probabilities, its batch, and requests in flight."""

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, MambaConfig, PreTrainedModel

from benchmarks.harness.tiny_models import CHARACTERS, EOS_ID, PAD_ID, tiny_folder
from tba.errors import Busy, ConfigError
from tba.generation.requests import generate
from tba.generation.transformers_generator import TransformersGenerator
from tba.models.policy import Policy, PolicyScorer
from tba.types import Prompt, Request, Response
from tests.support.models.generator_examples import (
    CONFIGS,
    PROMPTS,
    SIZES,
    TOKENS,
    V0,
    V1,
    make_folder,
    make_generator,
    make_prompts,
)


@cache
def alone(folder: Path) -> TransformersGenerator:
    return make_generator(folder, batch=1)


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("llama"))


@contextmanager
def forwards() -> Iterator[list[tuple[int, int]]]:
    """Record (rows, tokens) of every forward pass of a causal language model."""
    seen: list[tuple[int, int]] = []

    def look(module: torch.nn.Module, arguments: Any) -> None:
        if isinstance(module, PreTrainedModel) and module.get_output_embeddings() is not None:
            seen.append(tuple(arguments[0].shape))

    handle = torch.nn.modules.module.register_module_forward_pre_hook(look)
    try:
        yield seen
    finally:
        handle.remove()


# --- Any causal language model ---


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_is_what_the_library_itself_generates(tmp_path, name):
    generator = make_generator(make_folder(tmp_path, CONFIGS[name]))
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompts = make_prompts(PROMPTS)
    found = generate(generator, prompts, [[0]] * len(prompts), temperature=0)
    for prompt, [response] in zip(prompts, found, strict=True):
        tokens = torch.tensor([prompt.tokens])
        expected = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
            tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=12, pad_token_id=PAD_ID
        )
        assert response.tokens == tuple(expected[0, len(prompt.tokens) :].tolist())


@pytest.mark.parametrize("name", CONFIGS)
def test_logps_are_those_of_the_tempered_model_before_top_p_cuts_it(tmp_path, name):
    generator = make_generator(make_folder(tmp_path, CONFIGS[name]), batch=5)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    prompts = make_prompts(PROMPTS)
    found = generate(generator, prompts, [[1, 2, 3], [4], [5, 6], [7, 8]], temperature=0.7, top_p=0.9)
    for prompt, responses in zip(prompts, found, strict=True):
        for response in responses:
            with torch.no_grad():
                logits = model(torch.tensor([prompt.tokens + response.tokens])).logits[0, len(prompt.tokens) - 1 : -1]
            logps = (logits / 0.7).log_softmax(dim=1).gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(response.logps), logps, atol=2e-5, rtol=0)


def test_a_model_that_keeps_more_than_keys_and_values_is_refused(tmp_path):
    folder = make_folder(tmp_path, MambaConfig(hidden_size=16, num_hidden_layers=1, state_size=4, **SIZES, **TOKENS))
    with pytest.raises(ConfigError, match=r"model\.path: cannot generate with mamba: its cache has layers of type"):
        TransformersGenerator(device="cpu").adopt(folder, V0)


# --- Seeds ---


@settings(max_examples=25, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.text(CHARACTERS, min_size=1, max_size=20), st.lists(st.integers(0, 9), max_size=5)),
        min_size=1,
        max_size=6,
    ),
    batch=st.integers(1, 12),
)
def test_what_a_seed_yields_does_not_depend_on_what_it_is_batched_with(llama, requests, batch):
    prompts = make_prompts([text for text, _ in requests])
    together = make_generator(llama, batch=batch)
    found = generate(together, prompts, [seeds for _, seeds in requests], temperature=1.3)
    for prompt, (_, seeds), responses in zip(prompts, requests, found, strict=True):
        for seed, response in zip(seeds, responses, strict=True):
            [[single]] = generate(alone(llama), [prompt], [[seed]], temperature=1.3)
            assert (response.tokens, response.text, response.seed) == (single.tokens, single.text, seed)
            assert response.logps == pytest.approx(single.logps, abs=2e-5)


def test_seeds_differ_in_what_they_yield(llama):
    [responses] = generate(make_generator(llama), make_prompts(["1+1="]), [list(range(40))], temperature=1.5)
    assert len({response.tokens for response in responses}) > 30


def test_sampled_first_tokens_follow_the_model(llama):
    [prompt] = make_prompts(["12+"])
    generator = make_generator(llama, batch=500, limit=1)
    [responses] = generate(generator, [prompt], [list(range(4000))], temperature=2.0)
    found = Counter(response.tokens[0] for response in responses)
    model = AutoModelForCausalLM.from_pretrained(llama).eval()
    with torch.no_grad():
        expected = 4000 * (model(torch.tensor([prompt.tokens])).logits[0, -1] / 2.0).softmax(dim=0)
    likely = [token for token in range(len(expected)) if expected[token] >= 10]
    chi_square = sum((found[token] - expected[token].item()) ** 2 / expected[token].item() for token in likely)
    assert chi_square < len(likely) + 5 * (2 * len(likely)) ** 0.5


# --- Ends ---


def test_a_finished_response_has_its_end_token_and_any_other_has_the_whole_length(llama):
    generator = make_generator(llama, batch=7, limit=9)
    found = generate(generator, make_prompts(PROMPTS), [list(range(20))] * 4, temperature=2.0)
    responses = [response for group in found for response in group]
    finished = [response for response in responses if response.finished]
    assert 0 < len(finished) < len(responses)
    for response in responses:
        assert (EOS_ID in response.tokens) == response.finished == (response.tokens[-1] == EOS_ID)
        assert response.tokens.count(EOS_ID) <= 1 and len(response.logps) == len(response.tokens)
        assert response.finished or len(response.tokens) == 9
        assert "<" not in response.text


def test_a_limit_of_one_prompt_cuts_its_responses_short_and_changes_nothing_else(llama):
    prompts, seeds, limits = make_prompts(PROMPTS), [list(range(12))] * 4, [3, 99, 1, 9]
    whole = generate(make_generator(llama, limit=9), prompts, seeds, temperature=2.0)
    found = generate(make_generator(llama, limit=9), prompts, seeds, temperature=2.0, limits=limits)
    for limit, group, expected in zip(limits, found, whole, strict=True):
        assert [it.tokens for it in group] == [it.tokens[:limit] for it in expected]
        assert [it.finished for it in group] == [it.finished and len(it.tokens) <= limit for it in expected]


def test_a_model_may_have_several_end_tokens(tmp_path):
    folder = make_folder(tmp_path, CONFIGS["llama"])
    ends = list(range(1, 30))
    path = folder / "generation_config.json"
    path.write_text(path.read_text().replace('"eos_token_id": 1', f'"eos_token_id": {ends}'))
    [responses] = generate(make_generator(folder), make_prompts(["1"]), [list(range(20))], temperature=1.0)
    last = {response.tokens[-1] for response in responses if response.finished}
    assert last <= set(ends) and len(last) > 1


# --- The batch ---


@pytest.mark.parametrize("batch", [1, 3, 8, 100])
def test_no_more_responses_than_allowed_are_generated_side_by_side(llama, batch):
    with forwards() as seen:
        generate(make_generator(llama, batch=batch), make_prompts(PROMPTS), [list(range(6))] * 4, temperature=2.0)
    assert max(rows for rows, _ in seen) <= batch


def test_a_prompt_is_read_once_for_all_its_responses(llama):
    with forwards() as seen:
        generate(make_generator(llama), make_prompts(["12345", "6789"]), [list(range(16))] * 2, temperature=1.0)
    assert seen[0] == (2, 5) and all(tokens == 1 for _, tokens in seen[1:])


def test_ended_responses_leave_the_batch_and_waiting_ones_take_their_place(llama):
    generator = make_generator(llama, batch=16, limit=60)
    with forwards() as seen:
        [responses] = generate(generator, make_prompts(["12+"]), [list(range(96))], temperature=2.0)
    admissions = [rows for rows, tokens in seen if tokens > 1]
    computed = sum(rows for rows, tokens in seen if tokens == 1)
    needed = sum(len(response.tokens) - 1 for response in responses)  # the pass over the prompt gives the first token
    assert len(admissions) > 6  # more often than with whole batches
    assert needed <= computed < 1.2 * needed


def test_the_seconds_of_responses_add_up_to_those_that_passed_and_each_step_is_shared_alike(llama):
    generator, began = make_generator(llama), time.monotonic()
    found = [r for group in generate(generator, make_prompts(PROMPTS), [[1, 2]] * 4, temperature=1.0) for r in group]
    passed = time.monotonic() - began
    assert 0 < sum(r.generate_seconds for r in found) <= passed
    by_length = sorted((len(r.tokens), r.generate_seconds) for r in found)
    assert [seconds for _, seconds in by_length] == sorted(seconds for _, seconds in by_length)
    assert len({round(seconds, 12) for _, seconds in by_length}) == len({length for length, _ in by_length}) > 1


def test_nothing_asked_is_nothing_generated(llama):
    generator = make_generator(llama)
    assert generate(generator, [], [], temperature=1.0) == []
    assert generate(generator, make_prompts(["1", "2"]), [[], []], temperature=1.0) == [[], []]


# --- In flight ---


def request(text: str, seed: int, *, temperature: float = 1.0, top_p: float = 1.0, limit: int = 12) -> Request:
    [prompt] = make_prompts([text])
    return Request(prompt=prompt, seed=seed, limit=limit, temperature=temperature, top_p=top_p)


def drain(generator: TransformersGenerator, steps: int = 1000) -> dict[Request, Response]:
    found: dict[Request, Response] = {}
    for _ in range(steps):
        found |= generator.step()
    return found


@pytest.mark.parametrize("batch", [3, 64])
def test_requests_of_any_kind_may_join_at_any_step_and_are_answered_as_alone(llama, batch):
    """One later prompt is longer than everything before."""
    generator = make_generator(llama, batch=batch)
    first = [request("z", 1), request("1+2=", 2, temperature=0.5), request("hello", 3, top_p=0.6)]
    later = [request("what is it that you want, then?" * 2, 4), request("z", 5, temperature=0.0), request("q", 6)]
    generator.submit(first)
    found = drain(generator, 2)
    generator.submit(later)
    found |= drain(generator)
    assert found.keys() == {*first, *later} and generator.step() == []
    for it, response in found.items():
        alone_found = generate(
            alone(llama), [it.prompt], [[it.seed]], temperature=it.temperature, top_p=it.top_p, limits=[it.limit]
        )
        assert replace(response, generate_seconds=0, logps=()) == replace(
            alone_found[0][0], generate_seconds=0, logps=()
        )


def test_what_is_in_flight_goes_on_with_the_weights_that_are_adopted(tmp_path):
    """The first tokens come from the old weights, later ones do not. Later requests use the new weights alone."""
    old, new = (tiny_folder(tmp_path / str(seed), seed=seed) for seed in (0, 1))
    generator, before, after = make_generator(old), request("hello", 3), request("hello", 4)
    generator.submit([before])
    assert drain(generator, 4) == {}
    generator.adopt(new, V1)
    generator.submit([after])
    found = drain(generator)
    assert (found[before].version_start, found[before].version_end) == (V0, V1)
    assert (found[after].version_start, found[after].version_end) == (V1, V1)
    by_old, by_new = (
        [logps for [logps] in PolicyScorer(Policy.load(folder), V0).token_logps(
            [before.prompt, after.prompt], [[found[before]], [found[after]]], temperature=1.0
        )]
        for folder in (old, new)
    )  # fmt: skip
    assert found[before].logps[:4] == pytest.approx(by_old[0][:4], abs=1e-4)
    assert found[before].logps[4] != pytest.approx(by_old[0][4], abs=1e-2)
    assert found[after].logps == pytest.approx(by_new[1], abs=1e-4)


def test_another_model_cannot_take_over_what_is_in_flight(tmp_path, llama):
    generator = make_generator(llama)
    generator.submit([request("hello", 3)])
    other = make_folder(tmp_path / "other", CONFIGS["qwen3"])
    with pytest.raises(Busy, match="in flight"):
        generator.adopt(other, V1)
    [response] = drain(generator).values()
    assert response.version_end == V0
    generator.adopt(other, V1)
    assert generator.version == V1


# --- Refusals ---


def test_a_generator_without_weights_says_so():
    with pytest.raises(ConfigError, match=r"no version has been adopted yet, .* call adopt\(\)"):
        generate(TransformersGenerator(), make_prompts(["1"]), [[1]], temperature=1.0)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"temperature": -1.0}, "temperature must be >= 0, got -1"),
        ({"top_p": 0.0}, "top_p must be > 0 and <= 1, got 0"),
        ({"seeds": [[1], [2]]}, "1 prompts and 2 lists"),
        ({"limits": [0]}, "limits must be >= 1, got 0"),
        ({"prompts": [Prompt(prompt_id="void", text="", tokens=())]}, "'void' has no tokens"),
    ],
)
def test_impossible_requests_are_refused_by_name(llama, changes, message):
    request: dict[str, Any] = {"prompts": make_prompts(["1"]), "seeds": [[1]], "temperature": 1.0, **changes}
    with pytest.raises(ValueError, match=message):
        generate(make_generator(llama), **request)
