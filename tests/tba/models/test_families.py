"""For every causal language model, trainer, reference and generator compute the same as the model alone."""

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import EOS_ID, PAD_ID, batch_logps, trajectory
from tba.batches.batching import Batch, collate
from tba.batches.logprobs import token_logps
from tba.batches.packing import why_padded
from tba.errors import ConfigError
from tba.generation.requests import generate
from tba.generation.transformers_generator import TransformersGenerator
from tba.models.policy import Policy, PolicyScorer
from tba.presets import preset
from tba.train.learner import Learner
from tba.types import Prompt, Response, Version
from tests.support.models.families import FAMILIES, WINDOW, Family, family_folder
from tests.support.models.policy_examples import response

V0, V1 = Version(0, 1), Version(1, 1)
PROMPTS = [Prompt(prompt_id=str(it), text="", tokens=it) for it in [(4, 5, 6), (7,), tuple(range(8, 8 + 2 * WINDOW))]]
RESPONSES = [
    [(10, EOS_ID), tuple(range(10, 30))],
    [(EOS_ID,), (30, 31, 32, 33, 34, 35, 36, 11, EOS_ID)],
    [(15, 16, EOS_ID), (40, 41, 42, 43, 44, 45, 46)],
]
TEMPERATURE = 0.7


class Made(NamedTuple):
    family: Family
    first: Path
    second: Path  # with other weights


@pytest.fixture(scope="module", params=FAMILIES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    family, folder = FAMILIES[request.param], tmp_path_factory.mktemp("family")
    yield Made(
        family, family_folder(folder / "first", family), family_folder(folder / "second", family, seed=1)
    )  # fmt: skip


def loaded(folder: Path) -> Policy:
    return Policy.load(folder, device="cpu")


def precise(made: Made) -> Policy:
    """Return the first policy in the family's most precise dtype, with an implementation of experts that supports
    it."""
    policy = loaded(made.first)
    policy.model.to(made.family.dtype).set_experts_implementation("eager")
    return policy


def plain(policy: Policy) -> PreTrainedModel:
    """Return the model with the eager attention of transformers."""
    model = copy.deepcopy(policy.model)
    model.set_attn_implementation("eager")
    return model


def alone(model: PreTrainedModel, prompt: tuple[int, ...], response: tuple[int, ...]) -> Tensor:
    """[T] log-probabilities of a response, from all logits of its row."""
    logits = model(input_ids=torch.tensor([[*prompt, *response]]), use_cache=False).logits[0]
    logps = torch.log_softmax(logits / TEMPERATURE, dim=1)
    return logps[range(len(prompt) - 1, len(prompt) + len(response) - 1), response]


def batch() -> Batch:
    rows = [
        trajectory(
            prompt_id=prompt.prompt_id, prompt_tokens=prompt.tokens, response_tokens=tokens, reward=float(i),
            ref_logps=(-1.0,) * len(tokens),
        )
        for prompt, group in zip(PROMPTS, RESPONSES, strict=True)
        for i, tokens in enumerate(group)
    ]  # fmt: skip
    return collate(fetched_of(rows), responses_per_prompt=2, pad_id=PAD_ID, include_eos=True)


def gradients(model: PreTrainedModel, value: Tensor) -> Mapping[str, Tensor]:
    """Return all gradients that are not zero."""
    model.zero_grad()
    value.backward()
    found = {name: it.grad.clone() for name, it in model.named_parameters() if it.grad is not None}
    return {name: it for name, it in found.items() if it.any()}


def test_logps_and_gradients_packed_and_padded_are_those_of_each_row_alone(made):
    policy, rows = precise(made), batch()
    naive = plain(policy)
    expected = torch.cat(
        [
            alone(naive, prompt.tokens, tokens)
            for prompt, group in zip(PROMPTS, RESPONSES, strict=True)
            for tokens in group
        ]
    )
    weights_N = torch.randn(len(expected), generator=torch.Generator().manual_seed(0)).to(expected.dtype)
    by_parameter = gradients(naive, expected @ weights_N)
    assert (not why_padded(policy.model)) is made.family.packs
    ways = {"padded": token_logps(policy.model, rows.tokens_BT, rows.response_mask_BT, temperature=TEMPERATURE)}
    if made.family.packs:
        ways["packed"] = batch_logps(policy.model, rows, temperature=TEMPERATURE)
    for logp_BT in ways.values():
        found = logp_BT[rows.response_mask_BT]
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)  # norms compute in single precision
        torch.testing.assert_close(gradients(policy.model, found @ weights_N), by_parameter, rtol=1e-4, atol=1e-4)


def test_a_generator_tells_the_logps_that_the_trainer_computes_also_of_a_version_that_it_adopted(made):
    generator = TransformersGenerator(device="cpu", batch_responses=5, max_response_tokens=3 * WINDOW)
    if not made.family.generates:
        with pytest.raises(ConfigError, match=rf"^model\.path: cannot generate with {made.family.config.model_type}"):
            generator.adopt(made.first, V0)
        return
    models = []
    for version, folder in ((V0, made.first), (V1, made.second)):
        generator.adopt(folder, version)
        models.append(generator.policy.model)
        responses = generate(generator, PROMPTS, [[1, 2, 3], [4, 5], [6, 7, 8]], temperature=TEMPERATURE)
        policy = loaded(folder)
        assert mismatch(policy, responses) < 3e-5
        assert max(response.version_end for group in responses for response in group) == version
    assert models[0] is models[1]  # the second was loaded into the first model


def mismatch(policy: Policy, responses: list[list[Response]]) -> float:
    """Return the greatest difference of the generator's and the scorer's log-probabilities from each row alone."""
    naive = plain(policy)
    scored = PolicyScorer(policy, V0).token_logps(PROMPTS, responses, temperature=TEMPERATURE)
    away = 0.0
    for prompt, group, logps in zip(PROMPTS, responses, scored, strict=True):
        for answer, told in zip(group, logps, strict=True):
            with torch.no_grad():
                expected = alone(naive, prompt.tokens, answer.tokens)
            for found in (answer.logps, told):
                away = max(away, float((torch.tensor(found) - expected).abs().max()))
    return away


def test_a_scorer_with_weights_in_bfloat16_computes_what_products_in_bfloat16_do(made):
    scored = list[object]()
    for owns in (False, True):
        policy = loaded(made.first)
        responses = [[response(*tokens) for tokens in group] for group in RESPONSES]
        scorer = PolicyScorer(policy, V0, compute_dtype="bfloat16", owns=owns)
        assert (torch.bfloat16 in {it.dtype for it in policy.model.parameters()}) == owns
        scored.append(scorer.token_logps(PROMPTS, responses, temperature=TEMPERATURE))
    assert scored[0] == scored[1]


def test_what_is_saved_loads_as_the_same_weights_and_predictions(made, tmp_path):
    policy, tokens = loaded(made.first), torch.tensor([[4, 5, 6, 7, 8, 9, 10, 11]])
    snapshot = policy.snapshot()
    snapshot.save(tmp_path)
    again = loaded(tmp_path)
    assert again.snapshot().sha256 == snapshot.sha256 != loaded(made.second).snapshot().sha256
    with torch.no_grad():
        logits, expected = (it(input_ids=tokens, use_cache=False).logits for it in (again.model, policy.model))
    assert torch.equal(logits, expected)


def test_a_step_moves_every_weight_that_the_gradient_of_the_plain_model_reaches_and_lowers_the_loss(made):
    policy = precise(made)
    naive, rows = plain(policy), batch()
    logps = [
        alone(naive, prompt.tokens, tokens)
        for prompt, group in zip(PROMPTS, RESPONSES, strict=True)
        for tokens in group
    ]
    reached = set(gradients(naive, torch.cat(logps).sum()))
    before = {name: it.detach().clone() for name, it in policy.model.named_parameters()}
    changes = {"training.responses_per_prompt": 2, "training.learning_rate": 1e-5, "training.warmup_steps": 1}
    learner = Learner(preset("quickstart").replace({**changes, "search.temperature": TEMPERATURE}), policy)
    losses = [learner.learn(step, rows).metrics["loss"] for step in (1, 2)]
    assert losses[1] < losses[0]
    assert learner.packs is made.family.packs
    assert {name for name, it in policy.model.named_parameters() if not torch.equal(it, before[name])} == reached
