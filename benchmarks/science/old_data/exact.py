"""Exact measures of a policy on problems whose right answers are all known: no response is sampled.

The reward is 1 for right answers and 0 for all other responses. So the exact target of trajectory balance, the
posterior π_ref exp(r/β) / Z, has Z = 1 - p + p exp(1/β), where p is the probability with which the base policy π_ref is
right. In distances to the target all wrong responses count as one outcome. These distances are therefore lower bounds,
which miss only differences among wrong responses.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.science.lagged import Examine, start_of
from benchmarks.science.old_data.many_answers import ManyAnswers
from tba.batches.packing import Group, packed_logps
from tba.batches.padded_calls import tokens_per_call
from tba.config import Config
from tba.models.policy import Policy
from tba.tasks.registry import get_task
from tba.types import Prompt

Floats = NDArray[np.float64]
TRIES = (1, 8, 64)
PROBLEMS = {"many-answers": 16, "rare-answers": 16, "quickstart": 500}
"""Number of held-out problems in an examination, by the name of the task."""


def examine_of(config: Config, *, beta: float) -> Examine:
    """Return an examination that computes the mean over held-out problems of each measure of `measures_of`. The
    target of distances is that of `beta`, whatever the beta of the run is."""
    start, task = Policy.load(start_of(config)), get_task(config.task)
    prompts = task.prompts("test", [], start.tokenizer, max_tokens=config.search.max_prompt_tokens)
    prompts = prompts[: PROBLEMS[task.name]]
    answers = [task.right_answers(int(it.answer)) if isinstance(task, ManyAnswers) else [it.answer] for it in prompts]
    ref_logps = right_logps(start, prompts, answers)

    def examine(folder: Path) -> Mapping[str, float]:
        return measures(right_logps(Policy.load(folder), prompts, answers), ref_logps, beta)

    return examine


def right_logps(policy: Policy, prompts: Sequence[Prompt], answers: Sequence[Sequence[str]]) -> list[Floats]:
    """Return the log-probabilities of all right answers to each prompt."""
    tokenizer: Any = policy.tokenizer
    groups = [
        Group(prompt.tokens, [(*tokens, tokenizer.eos_token_id) for tokens in tokenizer(right).input_ids])
        for prompt, right in zip(prompts, answers, strict=True)
    ]
    logps = packed_logps(policy.model, groups, temperature=1.0, tokens_per_call=tokens_per_call(policy.device))
    whole = np.array([math.fsum(it) for it in logps])
    return np.split(whole, np.cumsum([len(group.responses) for group in groups])[:-1])


def measures(logps: Sequence[Floats], ref_logps: Sequence[Floats], beta: float) -> Mapping[str, float]:
    """Return the mean over all problems of each measure of `measures_of`."""
    each = [measures_of(logp_N, ref_logp_N, beta) for logp_N, ref_logp_N in zip(logps, ref_logps, strict=True)]
    return {name: mean(it[name] for it in each) for name in each[0]}


def measures_of(logp_N: Floats, ref_logp_N: Floats, beta: float) -> Mapping[str, float]:
    """Return the measures of one problem from the log-probabilities of its N right answers under the policy and under
    the base policy.

    `total_variation` and `kl` (of the policy from the target) are distances to the target. `log_probability` is the
    mean log-probability of right answers that are drawn from the target. `answers` is the exponential of the entropy of
    right answers: the number of answers that a uniform choice with this entropy has. `pass@k` is the probability that
    one of k responses is right, and `distinct@k` the expected number of different right answers among k responses.
    """
    p_N, target_N = np.exp(logp_N), posterior(ref_logp_N, beta)
    wrong, target_wrong = max(0.0, 1 - p_N.sum()), max(0.0, 1 - target_N.sum())
    right = p_N.sum()
    share_N = p_N / right
    found = {
        "right": right,
        "total_variation": 0.5 * (np.abs(p_N - target_N).sum() + abs(wrong - target_wrong)),
        "kl": _kl(np.append(p_N, wrong), np.append(target_N, target_wrong)),
        "log_probability": np.dot(target_N, logp_N) / target_N.sum(),
        "answers": math.exp(-np.sum(share_N * np.log(share_N, where=share_N > 0, out=np.zeros_like(share_N)))),
    }
    for k in TRIES:
        found |= {f"pass@{k}": 1 - wrong**k, f"distinct@{k}": np.sum(-np.expm1(k * np.log1p(-p_N)))}
    return {name: float(value) for name, value in found.items()}


def posterior(ref_logp_N: Floats, beta: float) -> Floats:
    """Return the probabilities of right answers under the target."""
    wrong = max(0.0, 1 - np.exp(ref_logp_N).sum())
    return np.exp(ref_logp_N) / (wrong * math.exp(-1 / beta) + np.exp(ref_logp_N).sum())


def _kl(p_N: Floats, target_N: Floats) -> float:
    there = p_N > 0
    return float(np.sum(p_N[there] * np.log(p_N[there] / np.maximum(target_N[there], 1e-300))))
