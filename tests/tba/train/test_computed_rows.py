"""`training.computed_rows`: equal rows are computed once, and groups without gradient are not computed."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from benchmarks.harness.fetched import fetched_of
from tba.objectives import OBJECTIVES as CLASSES
from tba.train.learner import Learner
from tba.types import Outcome, Trajectory
from tests.support.sampled_parameters import sampled
from tests.support.tba.micro_batch_examples import BETA, K, group, make

OBJECTIVES: dict[str, dict[str, Any]] = {
    **{name: {"objective__name": name} for name in CLASSES},
    "leave-one-out": {"objective__log_z": "leave-one-out"},
    "learned log Z": {"objective__log_z": "learned"},
    "anchored where it was sampled": {"objective__anchor": "behaviour"},
    "a mean of the sampling policy": {"objective__name": "tba-prime", "objective__centre": "behaviour"},
    "a reference that moves": {"objective__name": "trajectory-balance", "objective__reference_reset": 1},
    "grpo without penalty": {"objective__name": "grpo", "objective__penalty": "none"},
    "grpo with a penalty in the reward": {"objective__name": "grpo", "objective__penalty": "reward"},
    "rloo without penalty": {"objective__name": "rloo", "objective__penalty": "none"},
    "rloo without end tokens": {"objective__name": "rloo", "objective__include_eos": False},
}
MIXED, TWO_EQUAL, ALL_EQUAL, SAME_REWARD = range(4)
"""The groups of ROWS."""


def _equal(to: Trajectory, row: Trajectory) -> Trajectory:
    """Return `row` with the response of `to`; what the policy that sampled the two said of them may differ."""
    fields = ("response_tokens", "ref_logps", "loss_mask", "step_ends")
    changes = {name: getattr(to, name) for name in fields} | {"step_values": (0.2,) * len(to.step_ends or ())}
    return replace(row, **changes, behaviour_logps=tuple(x - 0.25 for x in to.behaviour_logps))


def _rows() -> list[Trajectory]:
    mixed, two, every, same = (
        group(0, 3, [2, 4, 3]),
        group(1, 2, [9, 6, 6]),
        group(2, 4, [5, 5, 5]),
        group(3, 2, [3, 4, 6]),
    )
    two[2] = _equal(two[0], two[2])
    every[1:] = [replace(_equal(every[0], it), reward=every[0].reward) for it in every[1:]]
    same = [replace(it, reward=0.5) for it in same]
    return [*mixed, *two, *every, *same]


ROWS = _rows()


def step(learner: Learner) -> tuple[dict[str, torch.Tensor], list[Outcome], dict[str, float]]:
    """Return gradients, outcomes and metrics of a step without its update."""
    outcomes, metrics = learner.differentiate(learner.collate(fetched_of(ROWS)), BETA)
    named = [item for it in learner.all_trained() for item in it.model.named_parameters()]
    return {name: it.grad.clone() for name, it in named if it.grad is not None}, outcomes, metrics


def tokens_read(learner: Learner) -> list[int]:
    """Record the numbers of tokens that the policy reads at once."""
    seen = list[int]()
    embeddings: Any = learner.policy.model.get_input_embeddings()
    embeddings.register_forward_hook(lambda _, inputs, out: seen.append(inputs[0].numel()))
    return seen


CUTS: dict[str, dict[str, int]] = {
    "at once": {},
    "few tokens": {"training__tokens_per_micro_batch": 20},
    "groups": {"training__groups_per_micro_batch": 1},
}
CASES = list(product(OBJECTIVES, ("packed", "padded"), CUTS))


@pytest.mark.parametrize(("name", "form", "cut"), sampled(CASES, kept=CASES[::5]))
def test_gradients_are_those_of_all_rows(name, form, cut):
    common = {"rows": ROWS, "packs": form == "packed", **CUTS[cut], **OBJECTIVES[name]}
    wanted, outcomes, metrics = step(make(training__computed_rows="all", **common))
    found, others, of_needed = step(make(training__computed_rows="needed", **common))
    assert max(float(it.abs().max()) for it in wanted.values()) > 1e-3
    assert found.keys() == wanted.keys()
    for parameter, expected in wanted.items():
        atol = 1e-9 * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(found[parameter], expected, rtol=1e-8, atol=atol, msg=parameter)
    assert [(it.slot, it.position) for it in others] == [(it.slot, it.position) for it in outcomes]
    for it, other in zip(outcomes, others, strict=True):
        if it.residual is not None:
            assert other.residual == pytest.approx(it.residual, rel=1e-6, abs=1e-6)
        assert other.advantage == pytest.approx(it.advantage, rel=1e-6, abs=1e-6)
        assert other.logp is None or other.logp == pytest.approx(it.logp, rel=1e-9)
    assert of_needed["loss"] == pytest.approx(metrics["loss"], rel=1e-6, abs=1e-9)
    assert metrics.get("equal_rewards") == of_needed.get("equal_rewards")


@pytest.mark.parametrize(
    ("name", "without"),
    [
        ("trajectory-balance", [ALL_EQUAL]),
        ("leave-one-out", [ALL_EQUAL]),
        ("a reference that moves", [ALL_EQUAL]),
        ("learned log Z", []),
        ("anchored where it was sampled", []),
        ("tba-prime", [ALL_EQUAL]),
        ("a mean of the sampling policy", []),
        ("rloo", [ALL_EQUAL]),
        ("rloo without penalty", [ALL_EQUAL, SAME_REWARD]),
        ("proximal-rloo", [ALL_EQUAL, SAME_REWARD]),
        ("dr-grpo", [ALL_EQUAL, SAME_REWARD]),
        ("grpo", []),
        ("grpo without penalty", [ALL_EQUAL, SAME_REWARD]),
        ("grpo with a penalty in the reward", [ALL_EQUAL]),
        *((name, []) for name in ("reinforce", "online-dpo", "kimi", "oapl", "ppo", "vine-ppo")),
    ],
)
def test_groups_whose_gradient_is_zero_are_not_computed(name, without):
    learner = make(rows=ROWS, training__computed_rows="needed", **OBJECTIVES[name])
    _, outcomes, metrics = step(learner)
    if without:
        computed = [row for n, row in enumerate(ROWS) if n // K not in without]
        assert metrics["computed_tokens"] == sum(len(row.response_tokens) for row in computed)
    assert sorted({it.slot for it in outcomes if it.logp is None}) == without
    for it in (it for it in outcomes if it.slot in without):
        stored = sum(ROWS[it.slot * K + it.position].ref_logps)
        assert (it.advantage, it.residual, it.log_z) == (0.0, 0.0 if learner.objective.has_residuals else None, None)
        assert it.ref_logp == (None if name == "a reference that moves" else pytest.approx(stored))


def test_the_policy_reads_equal_rows_once():
    """A group of which a model reads n tokens has the prompt and all but the last token of each response."""
    mixed, two, every, same = 3 + 1 + 3 + 2, 2 + 8 + 5, 4 + 4, 2 + 2 + 3 + 5
    for objective, expected in (
        ("kimi", mixed + two + every + same),
        ("trajectory-balance", mixed + two + same),
        ("dr-grpo", mixed + two),
    ):
        learner = make(rows=ROWS, training__computed_rows="needed", objective__name=objective)
        seen = tokens_read(learner)
        step(learner)
        assert seen == [expected], objective
    learner = make(
        rows=ROWS, training__computed_rows="needed", objective__name="kimi", training__tokens_per_micro_batch=24
    )
    seen = tokens_read(learner)
    step(learner)
    assert seen == [mixed + two, every + same]  # what is read counts against the budget


def test_a_step_on_groups_without_gradient_still_has_momentum():
    rows = ROWS[ALL_EQUAL * K : (ALL_EQUAL + 1) * K]
    common = {"rows": rows, "objective__name": "dr-grpo", "training__adam_beta1": 0.9}
    learners = [make(training__computed_rows=it, **common) for it in ("all", "needed")]
    for learner in learners:
        for parameter in learner.trained.parameters:
            learner.trained.optimizer.state[parameter]["step"] = torch.tensor(1.0)
            for moment in ("exp_avg", "exp_avg_sq"):
                learner.trained.optimizer.state[parameter][moment] = torch.full_like(parameter, 0.5)
        learner.learn(1, learner.collate(fetched_of(rows)))
    weights = [dict(it.policy.model.named_parameters()) for it in learners]
    assert all(torch.equal(it, weights[1][name]) for name, it in weights[0].items())
    before = dict(make(rows=rows).policy.model.named_parameters())
    assert [name for name, it in weights[1].items() if torch.equal(it, before[name])] == []
