"""`needs_reference` of an objective: whether log-probabilities under the reference can change the gradient."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any, get_args, get_type_hints

import pytest
import torch
from pydantic import ValidationError

from benchmarks.harness.fetched import fetched_of
from tba.errors import DataError
from tba.objectives import OBJECTIVES
from tba.train.learner import Learner
from tba.types import Outcome, Trajectory
from tests.support.tba.micro_batch_examples import BETA, ROWS, make

CHOICES = ("penalty", "anchor", "log_z", "centre")
"""Settings that may decide whether a loss uses the reference. All their values are tried."""
CORRECTIONS = (None, "none", "decoupled")
"""Corrections that are tried; None is the default of the objective."""


def _combinations() -> Iterator[dict[str, Any]]:
    for name, kind in OBJECTIVES.items():
        hints = get_type_hints(kind)
        chosen = [it for it in CHOICES if it in hints]
        corrections = CORRECTIONS if "correction" in hints else (None,)
        for correction, *values in product(corrections, *(get_args(hints[it]) for it in chosen)):
            given = dict(zip(chosen, values, strict=True)) | ({"correction": correction} if correction else {})
            try:
                kind(**given)
            except ValidationError:  # the objective refuses this combination
                continue
            yield {"name": name, **given}


COMBINATIONS = list(_combinations())
OTHER = [
    replace(it, ref_logps=tuple(-1.5 - 0.3 * ((i + n) % 3) for i in range(it.length))) for n, it in enumerate(ROWS)
]
WITHOUT = [replace(it, ref_logps=None) for it in ROWS]


def learner(chosen: dict[str, Any]) -> Learner:
    return make(**{f"objective__{name}": value for name, value in chosen.items()})


def step(
    chosen: dict[str, Any], rows: list[Trajectory]
) -> tuple[dict[str, torch.Tensor], list[Outcome], dict[str, float]]:
    """Return gradients, outcomes and metrics of a step without its update."""
    trainer = learner(chosen)
    outcomes, metrics = trainer.differentiate(trainer.collate(fetched_of(rows)), BETA)
    named = [item for it in trainer.all_trained() for item in it.model.named_parameters()]
    return {name: it.grad.clone() for name, it in named if it.grad is not None}, outcomes, metrics


def differ(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    assert some.keys() == others.keys()
    return any(not torch.equal(some[name], others[name]) for name in some)


def ids(chosen: dict[str, Any]) -> str:
    return "-".join(map(str, chosen.values()))


def test_all_objectives_are_tried_some_with_and_some_without_the_reference():
    assert {it["name"] for it in COMBINATIONS} == set(OBJECTIVES)
    needs = [OBJECTIVES[it["name"]](**it).needs_reference for it in COMBINATIONS]
    assert True in needs and False in needs


@pytest.mark.parametrize("chosen", COMBINATIONS, ids=ids)
def test_the_gradient_depends_on_the_reference_exactly_if_the_objective_needs_it(chosen):
    found, outcomes, metrics = step(chosen, ROWS)
    assert max(float(it.abs().max()) for it in found.values()) > 1e-6
    needs = learner(chosen).objective.needs_reference
    assert differ(found, step(chosen, OTHER)[0]) == needs
    if needs:
        with pytest.raises(DataError, match=r"search\.reference_logps was 'needed'"):
            step(chosen, WITHOUT)
        return
    unknown, without, of_those = step(chosen, WITHOUT)
    assert not differ(found, unknown)
    assert [replace(it, ref_logp=None) for it in outcomes] == without
    assert metrics.pop("log_ratio_mean") != 0
    assert of_those == metrics


@pytest.mark.parametrize("setting", [{"reference_reset": 5}, {"reference_decay": 0.9}], ids=ids)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_an_objective_whose_reference_moves_needs_it(name, setting):
    values = {"penalty": "none"} if "penalty" in get_type_hints(OBJECTIVES[name]) else {}
    values |= {"anchor": "reference"} if "anchor" in get_type_hints(OBJECTIVES[name]) else {}
    assert OBJECTIVES[name](**values, **setting).needs_reference


def test_a_batch_with_some_rows_without_the_reference_has_none():
    mixed = [*ROWS[:4], *WITHOUT[4:]]
    batch = learner({"name": "dr-grpo"}).collate(fetched_of(mixed))
    assert batch.ref_logp_B is None and batch.ref_logp_BT is None
    with pytest.raises(DataError, match="the objective needs log-probabilities under the reference"):
        learner({"name": "grpo"}).collate(fetched_of(mixed))
