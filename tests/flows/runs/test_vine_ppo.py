"""VinePPO with whole roles on real storage: searchers estimate values, and steps learn from them."""

import pytest
import torch

from benchmarks.harness.tiny_models import tiny_llama
from flows.commands import audit
from flows.planning import create, describe, resolve
from storage.maintenance.check import check
from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.errors import ConfigError
from tba.generation.requests import generate
from tba.generation.transformers_generator import TransformersGenerator
from tba.models.policy import Policy
from tba.objectives.policy_gradients.ppo import whiten
from tba.seeds import continuation_seed
from tba.types import Prompt, Version
from tests.support.flows.live_roles import rows, run_all, settings
from tests.support.tba.value_examples import CHARACTERS, TOKENIZER, text_of

SAMPLES, MOST, CAP = 3, 8, 3
CHANGES = {
    "objective.name": "vine-ppo",
    "objective.penalty": "none",
    "search.value_samples": SAMPLES,
    "search.value_steps": CAP,
    "search.max_response_tokens": MOST,
    "search.top_p": 1.0,
    "sync.keep_versions": 99,
    "training.steps": 4,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    Policy(tiny_llama(characters=CHARACTERS), TOKENIZER, torch.device("cpu")).snapshot().save(folder)
    config = settings(folder, **{"task.name": "tests.tba.search.test_values:Ones", **CHANGES})
    run = create.start(config, str(tmp_path_factory.mktemp("root")), "vine")
    run_all(run)
    return run


def test_every_trajectory_has_a_value_before_each_of_its_steps(finished: Run):
    whole = rows(
        finished,
        "select bool_and(len(step_ends) = len(step_values)), bool_and(step_ends[-1] = length), "
        f"max(len(step_ends)) > {CAP}, "
        f"bool_and(list_distinct(step_values[{CAP + 1}:] || [reward::float]) = [reward::float]) from trajectories",
    )
    assert whole == [(True, True, True, True)]
    assert check(finished).ok


def test_a_stored_value_is_the_mean_reward_of_repeated_continuations_from_its_state(finished: Run):
    """Each state is continued alone. Among responses with the same beginning, the first one gives the seeds."""
    generator = TransformersGenerator(device="cpu", batch_responses=1, max_response_tokens=MOST)
    found: dict[tuple, float] = {}
    compared = 0
    for version in rows(finished, "select distinct version_start, version_start_attempt from trajectories order by 1"):
        generator.adopt(Versions(finished).load(Version(*version)), Version(*version))
        stored = rows(
            finished,
            "select group_id, prompt, prompt_tokens, response_tokens, seed, step_ends, step_values from trajectories "
            f"where version_start = {version[0]} order by group_id, slot limit 32",
        )
        for group, text, asked, response, seed, ends, values in stored:
            prompt = Prompt(prompt_id=group, text=text, tokens=tuple(asked))
            for tokens, value in list(zip([0, *ends[:-1]], values, strict=True))[:CAP]:
                key = (group, prefix := tuple(response[:tokens]))
                if key not in found:
                    found[key] = earned(generator, prompt, prefix, seed)
                assert value == pytest.approx(found[key])
                compared += 1
    assert compared > len(found) > 20 and len(set(found.values())) > 5


def earned(generator: TransformersGenerator, prompt: Prompt, prefix: tuple[int, ...], seed: int) -> float:
    so_far = Prompt(prompt_id=prompt.prompt_id, text=prompt.text, tokens=prompt.tokens + prefix)
    seeds = [continuation_seed(seed, len(prefix), n) for n in range(SAMPLES)]
    [continued] = generate(generator, [so_far], [seeds], temperature=0.7, limits=[MOST - len(prefix)])
    texts = [text_of(prefix) + it.text for it in continued]
    assert [it.finished or len(prefix + it.tokens) == MOST for it in continued] == [True] * SAMPLES
    ones = [text.count("1") - 0.25 * (not it.finished) for text, it in zip(texts, continued, strict=True)]
    return sum(ones) / SAMPLES


def test_a_steps_advantages_follow_from_the_stored_values(finished: Run):
    """The advantages of tokens are whitened over the batch. A drawn row has the mean over its tokens that count."""
    for step in range(1, 5):
        drawn = rows(
            finished,
            "select advantage, length - finished::int, step_ends, step_values, reward "
            f"from draws d join trajectories using (trajectory_id) where d.step = {step} order by d.slot, position",
        )
        tokens_BT = torch.zeros(len(drawn), MOST, dtype=torch.float64)
        for row_T, (_, _, ends, values, reward) in zip(tokens_BT, drawn, strict=True):
            for start, end, value, after in zip([0, *ends], ends, values, [*values[1:], reward], strict=False):
                row_T[start:end] = after - value
        mask_BT = torch.arange(MOST) < torch.tensor([row[1] for row in drawn])[:, None]
        mean_B = whiten(tokens_BT, mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)
        assert [row[0] for row in drawn] == pytest.approx(mean_B.tolist(), abs=1e-4)
        assert mean_B.abs().max() > 0.1


def test_a_step_can_be_taken_again(finished: Run):
    found = audit.audit(finished, 4, tolerance=0.01)
    assert [it for it in (*found.compared, *found.rows) if not it.agrees] == []


def test_a_run_that_cannot_have_values_is_refused_before_it_begins():
    with pytest.raises(ConfigError, match=r"search\.value_samples must be 0 for task 'echo', which answers back"):
        resolve.resolve("tests.support.tba.turn_examples:Echo", {"search.value_samples": 9})
    values = describe.describe(resolve.resolve("gsm8k", {"search.value_samples": 9, "objective.name": "vine-ppo"}))
    assert "9 continuations from at most 25 of the states of each response" in values
    assert "8 more for each step of a response" in values and "less because continuations are not stored" in values
