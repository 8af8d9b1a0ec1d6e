"""Weights in float32, and matrix products in bfloat16."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import tiny_llama
from tba.batches import logprobs
from tba.config import Config, parse
from tba.models.policy import PolicyScorer
from tba.presets import PRESETS, preset
from tba.train.learner import Learner
from tba.types import Version
from tests.support.models.policy_examples import prompt, response
from tests.support.tba.micro_batch_examples import ROWS, make

BITS = 2**-8
"""Greatest relative error of a number in bfloat16."""


def learner(compute: str = "float32", *, dtype: torch.dtype = torch.float32, **changes: Any) -> Learner:
    model: Any = tiny_llama()
    return make(model=model.to(dtype), training__compute_dtype=compute, **changes)


def gradient(it: Learner) -> Tensor:
    it.differentiate(it.collate(fetched_of(ROWS)), 0.5)
    parameters = [p for trained in it.all_trained() for p in trained.model.parameters()]
    assert all(p.grad is None or p.grad.dtype == p.dtype for p in parameters)
    return torch.cat([p.grad.flatten().double() for p in parameters if p.grad is not None])


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", ["trajectory-balance", "ppo", "grpo"])
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("tokens", [None, 12])
def test_gradients_are_those_of_float32_but_for_the_rounding_of_bfloat16(name, packs, tokens):
    changes = {"packs": packs, "objective__name": name, "training__tokens_per_micro_batch": tokens}
    found = error(gradient(learner("bfloat16", **changes)), gradient(learner(**changes)))
    assert BITS / 100 < found < 16 * BITS


def test_of_a_cpu_auto_is_float32_to_the_bit():
    assert gradient(learner("auto")).equal(gradient(learner()))


def test_weights_in_bfloat16_are_computed_with_as_they_are():
    assert gradient(learner("bfloat16", dtype=torch.bfloat16)).equal(gradient(learner(dtype=torch.bfloat16)))


def test_products_of_the_output_layer_are_in_bfloat16_and_what_becomes_of_them_is_not(monkeypatch):
    seen: list[tuple[torch.dtype, torch.dtype]] = []
    write = logprobs.write_logps

    def watched(to_N: Tensor, logits_NV: Tensor, *rest: Any) -> None:
        seen.append((to_N.dtype, logits_NV.dtype))
        write(to_N, logits_NV, *rest)

    it = learner("bfloat16")
    monkeypatch.setattr(logprobs, "write_logps", watched)
    gradient(it)
    assert set(seen) == {(torch.float32, torch.bfloat16)}


def test_updates_that_bfloat16_would_round_away_are_kept():
    """A relative change of 1e-6 is lost in a weight with 8 bits of precision, and accumulates in one with 24 bits."""
    moved: dict[str, Tensor] = {}
    for name, it in {
        "float32": learner(training__learning_rate=1e-6),
        "masters": learner("bfloat16", training__learning_rate=1e-6),
        "pure": learner(dtype=torch.bfloat16, training__learning_rate=1e-6),
    }.items():
        before = _weights(it.policy.model)
        for step in range(1, 11):
            it.learn(step, it.collate(fetched_of(ROWS)))
        moved[name] = _weights(it.policy.model) - before
    assert error(moved["masters"], moved["float32"]) < 0.5 < 0.9 < error(moved["pure"], moved["float32"])


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()])


def test_new_runs_have_auto_and_those_stored_without_the_setting_float32():
    assert {preset(name).training.compute_dtype for name in PRESETS} == {"auto"}
    stored: dict[str, Any] = Config().to_dict()
    del stored["training"]["compute_dtype"]
    assert parse(stored).training.compute_dtype == "float32"


def test_a_reference_computes_as_the_trainer_does_so_that_rounding_is_no_log_ratio():
    """Policy and reference have the same weights, so every log-ratio must be 0."""
    it, rows = learner("bfloat16"), [*ROWS[:6], *ROWS[9:]]  # rows in which every token counts
    outcomes, _ = it.differentiate(it.collate(fetched_of(rows)), 0.5)
    prompts = [prompt(*row.prompt_tokens) for row in rows]
    responses = [[response(*row.response_tokens)] for row in rows]
    temperature = it.config.search.temperature

    def apart(compute_dtype: str) -> float:
        scorer = PolicyScorer(it.policy, Version(0, 1), compute_dtype=compute_dtype)
        found = [sum(own) for (own,) in scorer.token_logps(prompts, responses, temperature=temperature)]
        return sum(abs(logp - (of.logp or 0.0)) for logp, of in zip(found, outcomes, strict=True))

    assert apart("bfloat16") < 0.2 * apart("float32")
