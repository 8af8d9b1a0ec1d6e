"""Compute the sampled accuracy of the exact target of trajectory balance, on the held-out problems of the quickstart.

    python -m benchmarks.science.ceilings [--seeds 0 …] [--betas 0.05 …] [--out FILE.csv]
    python -m benchmarks.science.ceilings --show        only show the table of stored results

The target is the posterior π_ref exp(r/β) / Z. If the base policy π_ref gives the right answer to a problem with
probability p, the posterior gives it with probability p exp(1/β) / (1 - p + p exp(1/β)). The mean of this over 500
problems is the accuracy at which a run that has converged stays: the ceiling of its beta. It has no sampling error,
because p is the product of the probabilities of the answer's tokens.
"""

import argparse
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.rows import append, read, spread
from benchmarks.science.lagged import start_of
from tba.batches.packing import Group, packed_logps
from tba.batches.padded_calls import tokens_per_call
from tba.models.policy import Policy
from tba.presets import preset
from tba.tasks.registry import get_task

SEEDS, BETAS, PROBLEMS = (0, 1, 2), (0.05, 0.1, 0.25, 0.5, 1.0), 500
RESULTS = Path("docs/results/ceilings.csv")


@dataclass(frozen=True, kw_only=True)
class Row:
    seed: int
    beta: float
    base: float  # mean probability with which the base policy gives the right answer
    ceiling: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--betas", type=float, nargs="+", default=BETAS)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--show", action="store_true")
    options = parser.parse_args()
    if not options.show:
        known = {(row.seed, row.beta) for row in read(options.out, Row)}
        for seed in options.seeds:
            missing = [beta for beta in options.betas if (seed, beta) not in known]
            for row in ceilings(seed, missing) if missing else ():
                append(options.out, row)
    print("\n".join(table(read(options.out, Row))))


def ceilings(seed: int, betas: Sequence[float]) -> Iterator[Row]:
    logps = right_answers(seed)
    base = statistics.mean(map(math.exp, logps))
    for beta in betas:
        reached = statistics.mean(posterior(logp, beta) for logp in logps)
        yield Row(seed=seed, beta=beta, base=round(base, 5), ceiling=round(reached, 5))


def posterior(logp: float, beta: float) -> float:
    """Return the posterior's probability of the right answer, from its log-probability under the reference."""
    wrong = -math.expm1(logp)
    return 1.0 if wrong <= 0 else 1 / (1 + wrong * math.exp(-logp - 1 / beta))


def right_answers(seed: int) -> list[float]:
    """Return the log-probability of the right answer to each held-out problem, under the base policy of a seed."""
    config = preset("quickstart").replace({"seed": seed})
    policy = Policy.load(start_of(config))
    tokenizer: Any = policy.tokenizer
    task = get_task(config.task)
    prompts = task.prompts("test", [], tokenizer, max_tokens=config.search.max_prompt_tokens)[:PROBLEMS]
    groups = [Group(it.tokens, [(*tokenizer(it.answer).input_ids, tokenizer.eos_token_id)]) for it in prompts]
    found = packed_logps(policy.model, groups, temperature=1.0, tokens_per_call=tokens_per_call(policy.device))
    return list(map(sum, found))


def table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| beta | base policy | ceiling |"
    yield "|---:|---:|---:|"
    for beta in sorted({row.beta for row in rows}):
        chosen = [row for row in rows if row.beta == beta]
        yield f"| {beta:g} | {spread([it.base for it in chosen])} | {spread([it.ceiling for it in chosen])} |"


if __name__ == "__main__":
    main()
