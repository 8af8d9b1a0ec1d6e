"""Measure where each objective converges on data that never changes: all sequences of a universe small enough to count.

    python -m benchmarks.science.convergence [--only OBJECTIVE …] [--steps 4000] [--seeds 3] [--out FOLDER]
    python -m benchmarks.science.convergence --show        only show the table and the chart of stored results

Sequences have three tokens from a vocabulary of three; the reward is 1 if all tokens differ. The policy has one row of
logits per prefix and starts at the reference. Each step uses the whole data set at once, so there is no sampling noise.
The data has every sequence once (uniform data), or every sequence as often as the reference generates it (data of the
reference; its probabilities are halves and quarters, so 64 sequences have exactly the right proportions). All sequences
form one group. Online DPO would use only one pair of a group, so for it every two sequences form a group. Each seed has
another reference. The results are the total variation distance to the target (the reference tilted by
exp(reward / beta)) and the mean reward under the policy. The values of PPO and of sub-trajectory balance are a table
with one value per prefix, and a learned log Z is one number; both start at 0 and take a step with each step of the
policy. The values of VinePPO are exact: the mean reward of each prefix when the policy that generated the data
continues it.
"""

import argparse
import csv
import math
import statistics
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from html import escape
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from benchmarks.harness import toy
from benchmarks.harness.rows import standard_error
from tba import objectives
from tba.objectives import Groups, Loss

BETA, LEARNING_RATE = 0.5, 0.02
UNCLIPPED = {"correction": "clip", "correction_level": "response", "clip_low": 1.0, "clip_high": 1e9}
Data = Literal["uniform", "reference"]

OBJECTIVES: dict[str, dict[str, Any]] = {
    "trajectory balance": {},
    "trajectory balance, leave-one-out": {"log_z": "leave-one-out"},
    "trajectory balance, learned log Z": {"log_z": "learned"},
    "trajectory balance, anchored at what sampled": {"anchor": "behaviour"},
    "sub-trajectory balance": {"name": "subtrajectory-balance"},
    "path consistency": {"name": "subtrajectory-balance", "parts": "to-end"},
    "TBA', no ratio": {"name": "tba-prime", "correction": "none"},
    "TBA'": {"name": "tba-prime"},
    "TBA', clipped": {"name": "tba-prime", "correction": "clip"},
    "REINFORCE": {"name": "reinforce"},
    "REINFORCE, exact ratio of responses": {"name": "reinforce", **UNCLIPPED},
    "RLOO": {"name": "rloo"},
    "RLOO, no penalty": {"name": "rloo", "penalty": "none"},
    "RLOO, exact ratio of responses": {"name": "rloo", **UNCLIPPED},
    "Proximal RLOO": {"name": "proximal-rloo"},
    "GRPO": {"name": "grpo"},
    "GSPO": {"name": "grpo", "correction_level": "mean"},
    "Dr. GRPO": {"name": "dr-grpo"},
    "Dr. GRPO with k3": {"name": "dr-grpo", "penalty": "loss"},
    "Dr. GRPO with k3, no ratio": {"name": "dr-grpo", "penalty": "loss", "correction": "none"},
    "Dr. GRPO, TIS": {"name": "dr-grpo", "correction": "truncate", "ratio_cap": 2.0},
    "Dr. GRPO, CISPO": {"name": "dr-grpo", "correction": "cispo"},
    "Dr. GRPO, IcePop": {"name": "dr-grpo", "correction": "mask"},
    "Dr. GRPO, decoupled": {"name": "dr-grpo", "correction": "decoupled"},
    "ScaleRL": {
        "name": "grpo", "penalty": "none", "standardised_by": "batch", "normaliser": "group", "correction": "cispo",
        "clip_low": 1.0,
    },
    "M2PO": {"name": "m2po"},
    "BAPO": {"name": "bapo"},
    "AsymRE": {"name": "rloo", "penalty": "none", "baseline_shift": -0.1},
    "PPO": {"name": "ppo"},
    "PPO, no clipping": {"name": "ppo", "clip_low": 1.0, "clip_high": 1e9},
    "PPO, no ratio": {"name": "ppo", "correction": "none"},
    "VinePPO": {"name": "vine-ppo"},
    "VinePPO, no clipping": {"name": "vine-ppo", "clip_low": 1.0, "clip_high": 1e9},
    "Online DPO": {"name": "online-dpo"},
    "Kimi k1.5": {"name": "kimi"},
    "OAPL, anchored at the reference": {"name": "oapl", "anchor": "reference"},
}  # fmt: skip

IN_PAIRS = ("Online DPO",)


@dataclass(frozen=True)
class Measurement:
    objective: str
    data: Data
    seed: int
    distance_before: float
    distance: float
    reward: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=OBJECTIVES,
        metavar="OBJECTIVE",
        help="measure only these, and keep the rows of others",
    )
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=3, help="number of seeds")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--show", action="store_true", help="measure nothing, show stored results")
    options = parser.parse_args(arguments)
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1, got {options.seeds}")
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "convergence.csv"
    if not options.show:
        kept = [it for it in read(file) if it.objective not in options.only] if options.only else []
        write(file, kept + measure(options.only or OBJECTIVES, options.seeds, options.steps))
    found = read(file)
    file.with_suffix(".svg").write_text(drawn(found))
    print("\n".join(markdown(found)))


def measure(names: Collection[str], seeds: int, steps: int) -> list[Measurement]:
    found = []
    for name, seed in product(names, range(seeds)):
        for data in ("uniform", "reference"):
            found.append(Measurement(name, data, seed, *lead(loss_of(name), data, seed, steps, pairs=name in IN_PAIRS)))
    return found


def write(path: Path, found: Sequence[Measurement]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(found[0])))
        writer.writeheader()
        writer.writerows(asdict(it) for it in sorted(found, key=lambda it: list(OBJECTIVES).index(it.objective)))


def read(path: Path) -> list[Measurement]:
    with path.open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    return [
        Measurement(name, "uniform" if data == "uniform" else "reference", int(seed), *map(float, numbers))
        for name, data, seed, *numbers in rows
    ]


def loss_of(name: str) -> Callable[[Groups], Loss]:
    settings = {"name": "trajectory-balance", **OBJECTIVES[name]}
    objective = objectives.OBJECTIVES[settings["name"]](**settings)

    def loss(groups: Groups) -> Loss:
        if objective.needs_whole_batch:
            groups = objective.estimates(groups, beta=BETA).of(0, groups)
        return objective.loss(groups, beta=BETA)

    return loss


def lead(
    loss: Callable[[Groups], Loss], data: Data, seed: int, steps: int, *, pairs: bool = False
) -> tuple[float, float, float]:
    """Train a policy. Return its distances to the target before and after, and its mean reward after."""
    reference = quartered(seed)
    ref_NL = toy.token_logps(reference)
    target_N = toy.target_logps(ref_NL.sum(1), toy.ALL_DIFFER_N, BETA)
    chosen_PK = chosen(ref_NL, data)
    if pairs:
        chosen_PK = torch.combinations(chosen_PK[0])
    logits = reference.clone().requires_grad_()
    value_R, log_z_P = (torch.zeros(n, dtype=torch.float64, requires_grad=True) for n in (toy.R, 1))
    optimizer = torch.optim.Adam([logits, value_R, log_z_P], lr=LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        groups = everything(logits, ref_NL, data, chosen_PK)
        value_PKT = value_R[toy.PREFIX_ROWS_NL][chosen_PK]
        loss(replace(groups, value_PKT=value_PKT, log_z_P=log_z_P.expand(len(chosen_PK)))).value.backward()
        optimizer.step()
    logp_N = toy.sequence_logps(logits.detach())
    before = toy.total_variation(ref_NL.sum(1), target_N)
    return before, toy.total_variation(logp_N, target_N), float(logp_N.exp() @ toy.ALL_DIFFER_N)


def quartered(seed: int) -> Tensor:
    """Return the logits of a reference whose tokens have probabilities 1/2, 1/4 and 1/4, in random order."""
    order = torch.argsort(torch.rand(toy.R, toy.V, generator=torch.Generator().manual_seed(seed)), dim=1)
    return torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()[order]


def everything(logits: Tensor, ref_NL: Tensor, data: Data, chosen_PK: Tensor) -> Groups:
    """Return the whole data set for a policy with these logits. `chosen_PK` has the sequences of each group."""
    behaviour_NL = ref_NL if data == "reference" else torch.full_like(ref_NL, 1 / toy.V).log()
    reward_PK = toy.ALL_DIFFER_N[chosen_PK]
    value_NL = toy.exact_values(behaviour_NL, toy.ALL_DIFFER_N)[toy.PREFIX_ROWS_NL]
    next_NL = torch.cat([value_NL[:, 1:], toy.ALL_DIFFER_N[:, None]], dim=1)
    return Groups(
        logp_PKT=toy.token_logps(logits)[chosen_PK],
        mask_PKT=torch.ones(*chosen_PK.shape, toy.L, dtype=torch.bool),
        reward_PK=reward_PK,
        ref_logp_PK=ref_NL[chosen_PK].sum(2),
        ref_logp_PKT=ref_NL[chosen_PK],
        behaviour_logp_PKT=behaviour_NL[chosen_PK],
        step_value_PKT=value_NL[chosen_PK],
        step_next_PKT=next_NL[chosen_PK],
        length_PK=torch.full(chosen_PK.shape, toy.L),
        batch_reward=float(reward_PK.mean()),
        batch_spread=float((reward_PK - reward_PK.mean(1, True)).square().mean().sqrt()),
        batch_tokens=float(toy.L),
        max_tokens=toy.L,
    )


def chosen(ref_NL: Tensor, data: Data) -> Tensor:
    """[1, K] the indices of all sequences of the data, with repeats, as one group."""
    times_N = (64 * ref_NL.sum(1).exp()).round().long() if data == "reference" else torch.ones(toy.N, dtype=torch.long)
    return torch.repeat_interleave(torch.arange(toy.N), times_N)[None]


def markdown(found: Sequence[Measurement]) -> Iterator[str]:
    before = [it.distance_before for it in found if it.objective == found[0].objective and it.data == "uniform"]
    yield f"Before: {spread(before)}."
    yield ""
    yield "| objective | distance, uniform data | reward | distance, data of the reference | reward |"
    yield "|---|---:|---:|---:|---:|"
    for name in OBJECTIVES:
        cells = []
        for data in ("uniform", "reference"):
            of = [it for it in found if (it.objective, it.data) == (name, data)]
            cells += [spread([it.distance for it in of]), spread([it.reward for it in of])]
        yield f"| {' | '.join([name, *cells])} |"


def drawn(found: Sequence[Measurement]) -> str:
    """Return a chart on a logarithmic axis: a mark at the final distance of each objective and kind of data, and a line
    at the distance before."""
    bottom, top, left, right, row = -7, 0, 230, 640, 16
    height = row * len(OBJECTIVES)

    def x(distance: float) -> float:
        share = (max(math.log10(max(distance, 1e-300)), bottom) - bottom) / (top - bottom)
        return round(left + share * (right - left), 1)

    before = x(statistics.mean(it.distance_before for it in found))
    parts = [
        f'<line x1="{x(10.0**power)}" x2="{x(10.0**power)}" y1="0" y2="{height}" stroke="#e2e0db"/>'
        f'<text x="{x(10.0**power)}" y="{height + 14}" text-anchor="middle">1e{power}</text>'
        for power in range(bottom, top + 1)
    ]
    parts.append(f'<line x1="{before}" x2="{before}" y1="0" y2="{height}" stroke="#777" stroke-dasharray="3 3"/>')
    for n, name in enumerate(OBJECTIVES):
        y = row * n + row / 2
        parts.append(f'<text x="{left - 10}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        for data, colour, shift in (("uniform", "#2563a8", -2), ("reference", "#bd5415", 2)):
            ends = statistics.mean(it.distance for it in found if (it.objective, it.data) == (name, data))
            parts.append(
                f'<circle cx="{x(ends)}" cy="{y + shift}" r="3.5" fill="{colour}"><title>{ends:.2g}</title></circle>'
            )
    title = (
        '<text x="10" y="-22" class="title">total variation distance to the target, mean of the seeds</text>'
        f'<text x="{left}" y="-6" style="fill:#2563a8">uniform data</text>'
        f'<text x="{left + 90}" y="-6" style="fill:#bd5415">data of the reference</text>'
        f'<text x="{before}" y="-6" text-anchor="middle">before</text>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 -40 {right + 20} {height + 62}" width="720">'
        "<style>text{font:11px system-ui,sans-serif;fill:#555}.title{font-weight:600;font-size:13px;fill:#222}</style>"
        f'<rect y="-40" width="{right + 20}" height="{height + 62}" fill="#fff"/>{title}{"".join(parts)}</svg>\n'
    )


def spread(values: Sequence[float]) -> str:
    """Return the mean and, for several values, the standard error."""
    error = f" ± {standard_error(values):.1g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.2g}{error}"


if __name__ == "__main__":
    main()
