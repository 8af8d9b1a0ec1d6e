"""vLLM's responses, compared with the same weights in transformers. All tests share a real engine."""

import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.tiny_models import EOS_ID, tiny_tokenizer
from tba.batches.logprobs import chosen_logps
from tba.errors import Busy, ConfigError, Damaged, Missing, RunFailed
from tba.generation.requests import generate
from tba.generation.transformers_generator import TransformersGenerator
from tba.models.policy import Policy, PolicyScorer
from tba.types import Prompt, Request, Response, Version
from tests.support.builders import tokens_of
from tests.support.models.families import FAMILIES, family_folder
from tests.support.models.vllm_examples import (
    LIMIT,
    LIMITS,
    LONG,
    PROMPTS,
    SEEDS,
    V0,
    V1,
    V2,
    before_next,
    distance,
    make_generator,
    prompts_of,
    version_folders,
)
from tests.support.vllm import ON_CPU, SIMILAR, descendants, needs_vllm

pytestmark = needs_vllm


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Version, Path]:
    """Return folders of versions with different weights."""
    return version_folders(tmp_path_factory.mktemp("versions"))


@pytest.fixture(scope="module")
def engine() -> Iterator[Any]:
    with closing(make_generator()) as generator:
        yield generator


@pytest.fixture
def generator(engine: Any, folders: dict[Version, Path]) -> Any:
    """Return the shared generator, with version 0 adopted."""
    engine.adopt(folders[V0], V0)
    return engine


@pytest.mark.parametrize(
    ("family", "fault"), [("qwen3, biases", r"\(attention_bias\)"), ("gpt-oss", "experts of gpt-oss")]
)
def test_what_vllm_would_serve_as_another_model_is_refused_before_an_engine_starts(tmp_path, family, fault):
    family_folder(tmp_path, FAMILIES[family])
    with pytest.raises(ConfigError, match=rf"^engine\.name: vLLM cannot serve this model: .* {fault}.*; "):
        make_generator().adopt(tmp_path, V0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_log_probabilities_are_the_policys_at_the_temperature_it_was_sampled_at(
    generator: Any, folders: dict[Version, Path], temperature: float
):
    """Dividing logits by a temperature below 1 enlarges their rounding errors, which matter on a GPU."""
    groups = generate(generator, PROMPTS, SEEDS, temperature=temperature, limits=LIMITS)
    most = SIMILAR if ON_CPU else SIMILAR / min(1, temperature)
    assert distance(folders[V0], PROMPTS, groups, temperature=temperature) < most


def test_greedy_responses_are_those_of_transformers_and_have_the_policys_own_log_probabilities(
    generator: Any, folders: dict[Version, Path]
):
    """On a GPU, greedy tokens may differ if they are as likely as the most likely one."""
    plain = TransformersGenerator(device="cpu", max_response_tokens=LIMIT)
    plain.adopt(folders[V0], V0)
    seeds = [[0]] * len(PROMPTS)
    greedy = generate(generator, PROMPTS, seeds, temperature=0.0, limits=LIMITS)
    if ON_CPU:
        assert tokens_of(greedy) == tokens_of(generate(plain, PROMPTS, seeds, temperature=0.0))
    assert less_likely(folders[V0], PROMPTS, greedy) < SIMILAR
    assert distance(folders[V0], PROMPTS, greedy, temperature=1.0) < SIMILAR


def less_likely(folder: Path, prompts: list[Prompt], groups: list[list[Response]]) -> float:
    """Return by how much a token is less likely than the most likely one at its place."""
    policy, most = Policy.load(folder, device="cpu"), 0.0
    for prompt, [response] in zip(prompts, groups, strict=True):
        with torch.inference_mode():
            rows = policy.model(torch.tensor([prompt.tokens + response.tokens])).logits[0, len(prompt.tokens) - 1 : -1]
        chosen = rows.gather(1, torch.tensor(response.tokens)[:, None])[:, 0]
        most = max(most, float((rows.max(dim=1).values - chosen).max()))
    return most


def test_tokens_come_as_often_as_the_policy_gives_them_at_that_temperature(
    generator: Any, folders: dict[Version, Path]
):
    temperature, n = 0.7, 4000
    [group] = generate(generator, PROMPTS[:1], [list(range(n))], temperature=temperature, limits=[1])
    policy = Policy.load(folders[V0], device="cpu")
    with torch.inference_mode():
        logits_V = policy.model(torch.tensor([PROMPTS[0].tokens])).logits[0, -1]
    tokens_V = torch.arange(len(logits_V))
    expected_V = chosen_logps(logits_V.expand(len(tokens_V), -1), tokens_V, temperature=temperature).exp()
    seen = Counter(response.tokens[0] for response in group)
    likely = [token for token in tokens_V.tolist() if n * expected_V[token] > 5]
    chi_square = sum((seen[token] - n * expected_V[token]) ** 2 / (n * expected_V[token]) for token in likely)
    assert len(likely) > 5
    assert chi_square < len(likely) + 5 * (2 * len(likely)) ** 0.5  # five standard deviations


@pytest.mark.skipif(not ON_CPU, reason="on a GPU the rounding depends on the batch")
def test_what_a_seed_yields_does_not_depend_on_what_it_is_batched_with(generator: Any):
    together = generate(generator, PROMPTS, SEEDS, temperature=1.0, limits=LIMITS)
    for i in (1, 3):
        assert tokens_of(generate(generator, [PROMPTS[i]], [SEEDS[i][2:4]], temperature=1.0, limits=[LIMIT])) == [
            [response.tokens for response in together[i][2:4]]
        ]
    assert len({response.tokens for group in together for response in group}) > len(PROMPTS) * 3


def test_responses_share_all_the_time_in_which_they_were_in_flight(generator: Any):
    """This includes time without calls of `step`, for example while a searcher scores."""
    requests = [Request(prompt=PROMPTS[0], seed=seed, limit=LIMIT, temperature=1.0) for seed in range(4)]
    began, found = time.monotonic(), list[Response]()
    generator.submit(requests[:2])
    time.sleep(0.3)
    generator.submit(requests[2:])
    while len(found) < len(requests):
        found += [response for _, response in generator.step()]
    passed = time.monotonic() - began
    assert 0.3 < sum(response.generate_seconds for response in found) <= passed


def test_a_response_ends_with_its_end_token_or_at_its_limit_and_says_which(generator: Any):
    limits = [LIMIT, 3, 5, LONG + 1, 2]
    groups = generate(generator, PROMPTS, [list(range(40))] * len(PROMPTS), temperature=1.0, limits=limits)
    tokenizer = tiny_tokenizer()
    for limit, group in zip(limits, groups, strict=True):
        for response in group:
            assert response.finished == (response.tokens[-1] == EOS_ID)
            assert response.finished or len(response.tokens) == min(limit, LONG)
            assert EOS_ID not in response.tokens[:-1]
            assert response.text == tokenizer.decode(response.tokens, skip_special_tokens=True)
    assert {response.finished for group in groups for response in group} == {True, False}


def test_a_version_is_taken_by_the_running_engine_and_all_it_says_is_from_its_weights(
    generator: Any, folders: dict[Version, Path]
):
    """The prompt is longer than a block of the key-value cache: blocks of an earlier version must not be reused."""
    processes = engine_processes()
    long = prompts_of(["9" * 400])
    for version in (V1, V2, V0, V1):
        generator.adopt(folders[version], version)
        groups = generate(generator, long, [list(range(8))], temperature=1.0, limits=[LIMIT])
        assert {(response.version_start, response.version_end) for response in groups[0]} == {(version, version)}
        assert distance(folders[version], long, groups, temperature=1.0) < SIMILAR
    assert engine_processes() == processes


@pytest.mark.parametrize("before", [True, False], ids=["after another", "together"])
def test_responses_to_a_prompt_share_what_was_computed(generator: Any, before: bool):
    """Blocks of 32 tokens or fewer are reused within a version; otherwise the test above would prove nothing."""
    requests, salt = generator.requests, str(generator.version)
    engine = requests.engine
    prompt = prompts_of(["86420" * 9 if before else "97531" * 9])[0]
    if before:
        generate(generator, [prompt], [[1]], temperature=1.0, limits=[1])
    for seed in (2, 3, 4):
        engine.add_request(
            f"response {seed}",
            requests.prompt(prompt, generator.version),
            requests.sampling(Request(prompt=prompt, seed=seed, limit=1, temperature=1.0)),
        )
    cached = list[int]()
    while engine.has_unfinished_requests():
        cached += [output.num_cached_tokens for output in engine.step()]
    assert salt == str(V0) and len(cached) == 3
    assert sum(shared >= 32 for shared in cached) == (3 if before else 2)


def test_what_is_in_flight_goes_on_with_the_weights_that_are_adopted_and_under_their_name(
    generator: Any, folders: dict[Version, Path], monkeypatch: pytest.MonkeyPatch
):
    """The first tokens come from the old weights, the last do not. Later requests use the new weights alone. No token
    is sampled between the load of the new weights and the change of the version, however long that takes."""
    [prompt] = prompts_of(["hello"])
    before, after = (
        [Request(prompt=prompt, seed=seed, limit=LONG, temperature=1.0) for seed in range(first, first + 32)]
        for first in (0, 32)
    )
    generator.submit(before)
    found: dict[Request, Response] = {}
    while len(found) < 3:  # most are longer
        found |= generator.step()
    before_next(monkeypatch, generator.requests.engine, "set_weight_version", lambda: time.sleep(0.5))
    generator.adopt(folders[V1], V1)
    generator.submit(after)
    while len(found) < len(before) + len(after):
        found |= generator.step()
    across = [it for it in before if found[it].version_end == V1]
    assert len(across) > 5 and {found[it].version_start for it in before} == {V0}
    ended = [it for it in before if found[it].version_end == V0]
    assert len(ended) >= 3
    assert distance(folders[V0], [prompt], [[found[it] for it in ended]], temperature=1.0) < SIMILAR
    by_old = PolicyScorer(Policy.load(folders[V0]), V0).token_logps(
        [prompt] * len(across), [[found[it]] for it in across], temperature=1.0
    )
    for it, [logps] in zip(across, by_old, strict=True):
        assert found[it].logps[0] == pytest.approx(logps[0], abs=SIMILAR)
    assert sum(abs(found[it].logps[-1] - logps[-1]) > 0.1 for it, [logps] in zip(across, by_old, strict=True)) > 5
    assert {(found[it].version_start, found[it].version_end) for it in after} == {(V1, V1)}
    assert distance(folders[V1], [prompt], [[found[it] for it in after]], temperature=1.0) < SIMILAR


def test_what_waits_for_a_place_when_a_version_is_adopted_is_from_its_weights_alone(
    generator: Any, folders: dict[Version, Path]
):
    """This is also so if the weights before have read the prompt, for another response."""
    [prompt] = prompts_of(["9" * 400])
    requests = [Request(prompt=prompt, seed=seed, limit=LIMIT, temperature=1.0) for seed in range(160)]
    generator.submit(requests)
    found: dict[Request, Response] = {}
    while not found:
        found |= generator.step()
    generator.adopt(folders[V1], V1)
    while len(found) < len(requests):
        found |= generator.step()
    waited = [found[it] for it in requests if found[it].version_start == V1]
    assert len(waited) > 60 and {response.version_end for response in waited} == {V1}
    assert distance(folders[V1], [prompt], [waited], temperature=1.0) < SIMILAR


def test_another_model_cannot_take_over_what_is_in_flight(generator: Any, folders: dict[Version, Path], tmp_path: Path):
    folder, processes = tmp_path / "version", engine_processes()
    shutil.copytree(folders[V1], folder)
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    [prompt] = prompts_of(["hello"])
    generator.submit([Request(prompt=prompt, seed=1, limit=4, temperature=1.0)])
    with pytest.raises(Busy, match=f"version {V1} is another model"):
        generator.adopt(folder, V1)
    while not (found := generator.step()):
        pass
    [(_, response)] = found
    assert response.version_end == V0 == generator.version and engine_processes() == processes


@pytest.mark.parametrize("fault", ["gone", "without weights", "truncated"])
def test_a_folder_that_cannot_be_read_is_refused_and_the_weights_before_it_stay(
    generator: Any, folders: dict[Version, Path], tmp_path: Path, fault: str
):
    folder, processes = tmp_path / "version", engine_processes()
    if fault != "gone":
        shutil.copytree(folders[V1], folder)
        weights = folder / "model.safetensors"
        weights.unlink() if fault == "without weights" else weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(Missing if fault == "gone" else Damaged, match=str(V1)):
        generator.adopt(folder, V1)
    assert generator.version == V0 and engine_processes() == processes
    groups = generate(generator, PROMPTS, SEEDS, temperature=1.0, limits=LIMITS)
    assert {response.version_end for group in groups for response in group} == {V0}
    assert distance(folders[V0], PROMPTS, groups, temperature=1.0) < SIMILAR


def test_a_folder_that_vanishes_under_the_engine_is_refused_too(
    generator: Any, folders: dict[Version, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "version"
    shutil.copytree(folders[V1], folder)
    before_next(monkeypatch, generator, "open_files", lambda: shutil.rmtree(folder))
    with pytest.raises(Missing, match="was removed"):
        generator.adopt(folder, V1)
    groups = generate(generator, PROMPTS, SEEDS, temperature=1.0, limits=LIMITS)
    assert distance(folders[V0], PROMPTS, groups, temperature=1.0) < SIMILAR


def test_a_folder_that_vanishes_once_it_is_open_is_taken_whole(
    generator: Any, folders: dict[Version, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    folder = tmp_path / "version"
    shutil.copytree(folders[V1], folder)
    before_next(monkeypatch, generator, "load_opened", lambda: shutil.rmtree(folder))
    generator.adopt(folder, V1)
    groups = generate(generator, PROMPTS, SEEDS, temperature=1.0, limits=LIMITS)
    assert distance(folders[V1], PROMPTS, groups, temperature=1.0) < SIMILAR


def test_signals_to_the_whole_group_of_a_role_leave_its_engine_at_work(
    generator: Any, folders: dict[Version, Path], monkeypatch: pytest.MonkeyPatch
):
    def signal_all() -> None:
        for pid in descendants(os.getpid()):
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)

    expected = tokens_of(generate(generator, PROMPTS, SEEDS, temperature=1.0, limits=LIMITS))
    before_next(monkeypatch, generator.requests.engine, "step", signal_all)
    groups = generate(generator, PROMPTS, SEEDS, temperature=1.0, limits=LIMITS)
    assert distance(folders[V0], PROMPTS, groups, temperature=1.0) < SIMILAR
    assert not ON_CPU or tokens_of(groups) == expected


def test_responses_that_are_broken_off_are_never_told(generator: Any, monkeypatch: pytest.MonkeyPatch):
    engine = generator.requests.engine
    with monkeypatch.context() as patch:
        before_next(patch, engine, "step", lambda: engine.sleep(level=0, mode="abort"))
        with pytest.raises(RunFailed, match="broke off a response: abort"):
            generate(generator, PROMPTS, SEEDS, temperature=1.0, limits=LIMITS)
    engine.wake_up(tags=["scheduling"])


def test_an_engine_that_may_have_got_a_part_of_the_weights_ends_the_role(
    generator: Any, folders: dict[Version, Path], monkeypatch: pytest.MonkeyPatch
):
    """This may happen if memory runs out during the load."""
    monkeypatch.setattr(
        generator, "load_opened", lambda version: generator.requests.engine.collective_rpc("no_such_method")
    )
    with pytest.raises(RunFailed, match=f"failed while it loaded version {V1}"):
        generator.adopt(folders[V1], V1)


@pytest.mark.parametrize("on_cpu", [True, False])
def test_any_number_of_responses_can_be_generated_side_by_side(folders: dict[Version, Path], on_cpu: bool):
    from tba.generation.vllm_generator import VLLMGenerator

    generator = VLLMGenerator(on_cpu=on_cpu, batch_responses=10_000)
    config = generator.engine_arguments(folders[V0]).create_engine_config()
    assert config.scheduler_config.max_num_seqs == 10_000


def test_log_probabilities_that_would_not_be_the_policys_are_refused(generator: Any):
    with pytest.raises(ValueError, match=r"top_p 0\.5"):
        generate(generator, PROMPTS, SEEDS, temperature=0.7, top_p=0.5)


def engine_processes() -> set[int]:
    return {process.pid for process in active_children() if process.pid}
