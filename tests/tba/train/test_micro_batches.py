import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel

from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import tiny_llama
from tba.batches.batching import Batch
from tba.batches.packing import CannotPack, Group
from tba.objectives import OBJECTIVES
from tba.train.auxiliary_models import LogZ, ValueModel
from tba.train.learner import Learner, as_groups
from tba.train.micro_batches import Packed
from tba.train.schedules import learning_rate_at
from tba.types import Trajectory
from tests.support.tba.micro_batch_examples import BETA, GPT2, ROWS, K, group, make

OBJECTIVES: dict[str, dict[str, Any]] = {
    **{name: {"objective__name": name} for name in OBJECTIVES},
    "m2po": {"objective__name": "m2po", "objective__second_moment": 2.0},  # the ratios here are far from 1
    "leave-one-out": {"objective__log_z": "leave-one-out"},
    "learned log Z": {"objective__log_z": "learned"},
    "anchored where it was sampled": {"objective__anchor": "behaviour"},
    "a reference that moves": {"objective__name": "grpo", "objective__reference_reset": 1},
    "a reference that follows": {"objective__reference_decay": 0.9},
    "grpo by tokens of the batch": {"objective__name": "grpo", "objective__normaliser": "tokens"},
    "grpo by the spread of the batch": {
        "objective__name": "grpo",
        "objective__penalty": "none",
        "objective__standardised_by": "batch",
        "objective__normaliser": "group",
    },
    "weighted by the ratio": {"objective__weights": "ratio", "objective__behaviour_share": 0.5},
    "with a measured share": {"objective__behaviour_share": "measured"},
    "rloo for whole responses": {"objective__name": "proximal-rloo", "objective__include_eos": False},
}


def found_by(learner: Learner, rows: list[Trajectory] = ROWS) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return gradients and metrics of a step without its update."""
    outcomes, metrics = learner.differentiate(learner.collate(fetched_of(rows)), BETA)
    assert [(it.slot, it.position) for it in outcomes] == [divmod(i, K) for i in range(len(rows))]
    of_rows = {f"{name} {i}": getattr(it, name) for i, it in enumerate(outcomes) for name in ("logp", "advantage")}
    return gradients(learner), {**metrics, **of_rows}


def gradients(learner: Learner) -> dict[str, Tensor]:
    models = [it.model for it in learner.all_trained()]
    named = [(f"{i} {name}", it.grad) for i, model in enumerate(models) for name, it in model.named_parameters()]
    return {name: grad.clone() for name, grad in named if grad is not None}


def naive(learner: Learner, rows: list[Trajectory] = ROWS) -> dict[str, Tensor]:
    """Return the gradients of the loss of the whole batch, with every row read alone and logits of all positions."""
    batch = learner.collate(fetched_of(rows))
    if learner.reference:
        ref_logp_BT = alone(batch, logps_of(learner, learner.reference.model)).detach()
        by_token = None if batch.ref_logp_BT is None else ref_logp_BT
        batch = replace(batch, ref_logp_B=ref_logp_BT.sum(dim=1), ref_logp_BT=by_token)
    longest = learner.config.search.max_response_tokens
    logp_BT = alone(batch, logps_of(learner, learner.policy.model))
    groups = as_groups(logp_BT, batch, whole=batch, max_tokens=longest)
    model = learner.auxiliary.model if learner.auxiliary else None
    if isinstance(model, ValueModel):
        value_BT = alone(batch, lambda tokens_1T: model.head(model.backbone(tokens_1T).last_hidden_state[0, :-1]))
        groups = replace(groups, value_PKT=value_BT.unflatten(0, (-1, K)))
    if isinstance(model, LogZ):
        prompts = [torch.tensor([row.prompt_tokens]) for row in rows[::K]]
        hidden = [learner.policy.model.base_model(it).last_hidden_state[0].mean(dim=0).detach() for it in prompts]
        groups = replace(groups, log_z_P=torch.stack([model.head(it) for it in hidden]))
    if learner.objective.needs_whole_batch:
        groups = learner.objective.estimates(groups, beta=BETA).of(0, groups)
    for it in learner.all_trained():
        it.model.zero_grad()
    learner.objective.loss(groups, beta=BETA).value.backward()
    return gradients(learner)


def logps_of(learner: Learner, model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    def logps(tokens_1T: Tensor) -> Tensor:
        logps_TV = torch.log_softmax(model(tokens_1T).logits[0, :-1] / learner.config.search.temperature, dim=-1)
        return logps_TV.gather(1, tokens_1T[0, 1:, None])[:, 0]

    return logps


def alone(batch: Batch, of_row: Callable[[Tensor], Tensor]) -> Tensor:
    """[B, T] the result of `of_row` for each counted token after the first of each row, and 0 elsewhere."""
    found = []
    for tokens_T, mask_T, length in zip(batch.tokens_BT, batch.response_mask_BT, batch.lengths, strict=True):
        padding = (1, len(tokens_T) - length)
        found.append(nn.functional.pad(of_row(tokens_T[None, :length]), padding) * mask_T)
    return torch.stack(found)


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_are_those_of_every_row_read_alone_whatever_is_read_at_once(name, packs):
    learner = make(packs=packs, **OBJECTIVES[name])
    expected, told = naive(learner), None
    assert max(float(it.abs().max()) for it in expected.values()) > 1e-3
    cuts = [{"groups": 1}, *({"tokens": most} for most in (1, 17, 40))]
    for cut in cuts:
        changes = {f"training__{kind}_per_micro_batch": most for kind, most in cut.items()}
        found, metrics = found_by(make(packs=packs, **changes, **OBJECTIVES[name]))
        assert found.keys() == expected.keys()
        for parameter, wanted in expected.items():
            scale = float(wanted.abs().max())
            torch.testing.assert_close(found[parameter], wanted, rtol=1e-9, atol=1e-10 * max(1.0, scale), msg=parameter)
        told = told or metrics
        assert metrics == pytest.approx(told, rel=1e-6, abs=1e-9)  # rewards are of single precision


@st.composite
def batches(draw: st.DrawFn) -> list[Trajectory]:
    lengths = st.lists(st.integers(1, 12), min_size=K, max_size=K)
    shapes = draw(st.lists(st.tuples(st.integers(1, 5), lengths, st.booleans()), min_size=1, max_size=4))
    return [row for slot, (prompt, them, holes) in enumerate(shapes) for row in group(slot, prompt, them, holes=holes)]


NAMES = ("trajectory-balance", "grpo", "ppo", "learned log Z", "a reference that moves")


@hypothesis_settings(max_examples=30, deadline=None)
@given(batches(), st.integers(1, 60), st.booleans(), st.sampled_from(NAMES))
def test_no_model_reads_more_at_once_than_the_budget_or_one_response_and_gradients_stay_the_same(
    rows, most, packs, name
):
    learner = make(packs=packs, rows=rows, training__tokens_per_micro_batch=most, **OBJECTIVES[name])
    seen = watched(learner)
    found, _ = found_by(learner, rows)
    longest = max(len(row.prompt_tokens) + len(row.response_tokens) - 1 for row in rows)
    assert seen.keys() >= {"policy"} and all(calls for calls in seen.values())
    assert max(tokens for calls in seen.values() for tokens, _ in calls) <= max(most, longest)
    whole, _ = found_by(make(packs=packs, rows=rows, **OBJECTIVES[name]), rows)
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-10)


def watched(learner: Learner) -> dict[str, list[tuple[int, bool]]]:
    """Record for each model the numbers of tokens that it reads at once, each with True if gradients are computed."""
    models: dict[str, Any] = {"policy": learner.policy.model}
    if learner.reference:
        models["reference"] = learner.reference.model
    if learner.auxiliary and isinstance(learner.auxiliary.model, ValueModel):
        models["value"] = learner.auxiliary.model.backbone
    seen: dict[str, list[tuple[int, bool]]] = {name: [] for name in models}
    for name, model in models.items():
        model.get_input_embeddings().register_forward_hook(
            lambda _, inputs, out, name=name: seen[name].append((inputs[0].numel(), torch.is_grad_enabled()))
        )
    return seen


def calls(most: int | None, *, packs: bool = True, **changes: Any) -> dict[str, list[tuple[int, bool]]]:
    learner = make(packs=packs, training__tokens_per_micro_batch=most, **changes)
    seen = watched(learner)
    found_by(learner)
    return seen


def without(*tokens: int) -> list[tuple[int, bool]]:
    return [(it, False) for it in tokens]


def differentiated(*tokens: int) -> list[tuple[int, bool]]:
    return [(it, True) for it in tokens]


def test_whole_groups_are_read_once_and_one_above_the_budget_twice():
    assert calls(None) == {"policy": differentiated(47)}
    assert calls(47) == {"policy": differentiated(47)}
    assert calls(46) == {"policy": differentiated(45, 2)}
    assert calls(28) == {"policy": differentiated(7, 28, 12)}
    # Pieces of the second group have the prompt and 8, 13 or 5 tokens of a response: its last token is never read.
    assert calls(23) == {"policy": [*differentiated(7), *without(23, 7), *differentiated(23, 7, 12)]}
    assert calls(17) == {"policy": [*differentiated(7), *without(10, 15, 7), *differentiated(10, 15, 7, 12)]}
    assert calls(1)["policy"][-7:] == [*differentiated(6, 4, 8), *without(1, 2), *differentiated(1, 2)]


def test_padded_rows_count_with_their_padding():
    assert calls(None, packs=False) == {"policy": differentiated(12 * 15)}
    assert calls(45, packs=False) == {"policy": differentiated(3 * 6, 3 * 15, 3 * 8, 3 * 2)}
    in_pieces = (2 * 15, 7)
    expected = [*differentiated(3 * 6), *without(*in_pieces), *differentiated(*in_pieces, 3 * 8, 3 * 2)]
    assert calls(30, packs=False) == {"policy": expected}


def test_what_is_read_for_an_estimate_of_the_whole_batch_is_not_read_for_it_again():
    each = [*without(7, 10, 15, 7, 12), *differentiated(7, 10, 15, 7, 12)]
    assert calls(17, objective__name="ppo") == {"policy": each, "value": each}
    assert calls(17, objective__name="vine-ppo") == {"policy": each}


def test_a_moving_reference_reads_what_the_policy_reads_once():
    seen = calls(17, objective__reference_reset=1)
    assert seen["reference"] == without(7, 10, 15, 7, 12)


@pytest.mark.parametrize("budget", [None, 20])
def test_the_learning_rate_follows_the_effective_share_of_the_whole_batch(budget: int | None):
    """The effective number of responses is the square of the sum of their ratios, divided by the sum of squares."""
    learner = make(training__rate_by_effective_share=True, training__tokens_per_micro_batch=budget)
    batch = learner.collate(fetched_of(ROWS))
    assert batch.behaviour_logp_BT is not None
    learned = learner.learn(7, batch)
    logp_B = torch.tensor([it.logp for it in learned.outcomes], dtype=torch.float64)
    ratio_B = (logp_B - batch.behaviour_logp_BT.sum(dim=1)).exp()
    share = float(ratio_B.sum() ** 2 / ratio_B.square().sum() / len(ROWS))
    assert 1 / len(ROWS) < share < 0.9
    expected = learning_rate_at(7, learner.config.training) * share**0.5
    assert learned.metrics["effective_share"] == pytest.approx(share)
    assert learned.metrics["lr"] == pytest.approx(expected)
    assert learner.trained.optimizer.param_groups[0]["lr"] == pytest.approx(expected)


def test_groups_without_a_gradient_count_in_the_effective_share_too():
    rows = [replace(it, reward=1.0) if it.prompt_id == "1" else it for it in ROWS]
    shares = {}
    for computed in ("all", "needed"):
        learner = make(
            objective__name="dr-grpo", training__rate_by_effective_share=True, training__computed_rows=computed
        )
        learned = learner.learn(7, learner.collate(fetched_of(rows)))
        shares[computed] = learned.metrics["effective_share"]
    assert shares["needed"] == shares["all"]


def test_prompts_whose_log_z_is_learned_are_read_within_the_budget_too():
    """Each prompt is read once with its padding, which a packed row of all of them does not have."""
    rows = [row for slot, prompt in enumerate((9, 1, 1)) for row in group(slot, prompt, [1, 1, 1])]
    learner = make(rows=rows, training__tokens_per_micro_batch=11, objective__log_z="learned")
    seen = watched(learner)
    found_by(learner, rows)
    assert seen["policy"] == [*differentiated(11), *without(9, 2)]


@pytest.mark.parametrize("packs", [True, False])
def test_rows_of_one_token_of_which_nothing_counts_are_read_all_the_same(packs):
    rows = group(0, 1, [1, 1, 1])
    found, metrics = found_by(make(packs=packs, rows=rows, objective__include_eos=False), rows)
    assert metrics["logp 0"] == 0 and all(not it.any() for it in found.values())


def test_within_the_budget_a_step_is_the_same_to_the_last_bit():
    """It equals a step with the same groups per micro-batch, set by number."""
    norms = []
    for changes in ({"groups": 4}, {"tokens": 47}):
        learner = make(model=tiny_llama(), **{f"training__{kind}_per_micro_batch": n for kind, n in changes.items()})
        found, metrics = found_by(learner)
        norms.append((metrics, {name: it.tolist() for name, it in found.items()}))
    assert norms[0] == norms[1]


def test_in_single_precision_two_passes_and_one_are_as_far_apart_as_rounding():
    found = [
        found_by(make(model=tiny_llama(), training__tokens_per_micro_batch=most, objective__name="ppo"))[0]
        for most in (1000, 10)
    ]
    for name, wanted in found[0].items():
        assert float((found[1][name] - wanted).norm()) <= 1e-5 * float(wanted.norm()) + 1e-7, name


@pytest.mark.parametrize("little", [False, True])
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("name", ["a reference that follows", "ppo", "learned log Z"])
def test_nothing_is_dropped_whatever_the_model_drops_in_training(name, packs, little):
    """Dropout is off in the policy, in models that start as its copy, and in recomputed layers."""
    drops, found = copy.deepcopy(GPT2), list[Any]()
    for it in drops.modules():
        if isinstance(it, nn.Dropout):
            it.p = 0.5
    for model in (GPT2, drops):
        changes = {"training__tokens_per_micro_batch": 17, "training__checkpoint_activations": little}
        found.append(found_by(make(model=model, packs=packs, **changes, **OBJECTIVES[name]))[0])
    assert found[0].keys() == found[1].keys() and all(it.equal(found[1][of]) for of, it in found[0].items())


class TurnsBack(LlamaForCausalLM):
    """A model that supports other attention, but one of its layers keeps its own."""

    def set_attn_implementation(self, attn_implementation: str | dict, allow_all_kernels: bool = False) -> None:
        super().set_attn_implementation(attn_implementation, allow_all_kernels)
        self.model.layers[1].self_attn.config = copy.copy(self.config)
        self.model.layers[1].self_attn.config._attn_implementation = "sdpa"


@pytest.mark.parametrize("name", ["trajectory-balance", "ppo"])
def test_a_model_that_turns_out_not_to_pack_is_read_in_padded_rows_within_the_budget(name):
    model = TurnsBack(tiny_llama().config).double().eval()
    learner = make(model=model, training__tokens_per_micro_batch=20, objective__name=name)
    seen = watched(learner)
    found, _ = found_by(learner)
    assert not learner.packs and max(tokens for them in seen.values() for tokens, _ in them) <= 20
    # Norms compute in single precision in every model, so their last digit may differ.
    torch.testing.assert_close(found, naive(make(model=model, objective__name=name)), rtol=1e-5, atol=1e-5)


def test_a_backbone_that_does_not_take_the_attention_given_is_not_packed():
    backbone = tiny_llama().base_model
    backbone.layers[1].self_attn.config = copy.copy(backbone.config)
    with pytest.raises(CannotPack, match="1 of 2 layers"):
        Packed([Group((4, 5), [(6, 7)])], torch.tensor([True, True])).hidden(backbone)
