"""Where each objective leads, given data that never changes: every sequence of a universe small enough to count.

    python -m benchmarks.science.convergence [--steps 4000] [--seeds 3] [--out FOLDER]

Sequences of three tokens out of three; the reward is 1 if all differ. A policy with a row of logits per prefix starts
at the reference and takes steps on the whole data set at once, so that nothing is left to chance: either every sequence
once, as a uniform sampler would give it, or as often as the reference gives it (its probabilities are quarters and
halves, so that 64 sequences are exactly in proportion). Seeds give other references. Said is the total variation
distance to the target, the reference tilted by exp(reward / beta), and the mean reward under the policy. The values of
PPO are a table, one for each prefix, and a learned log Z is one number; both begin at 0 and take a step beside each of
the policy's.
"""

import argparse
import csv
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from tba.config import ObjectiveConfig
from tba.objectives import Groups, Loss, make_estimator, make_objective
from tests.tba import toy

BETA, LEARNING_RATE = 0.5, 0.02
UNCLIPPED = {"correction": "clip", "correction_level": "response", "clip_low": 1.0, "clip_high": 1e9}
Data = Literal["uniform", "reference"]

OBJECTIVES: dict[str, dict[str, Any]] = {
    "trajectory balance": {},
    "trajectory balance, leave-one-out": {"log_z": "leave-one-out"},
    "trajectory balance, learned log Z": {"log_z": "learned"},
    "trajectory balance, anchored at what sampled": {"anchor": "behaviour"},
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
    "PPO": {"name": "ppo"},
    "PPO, no clipping": {"name": "ppo", "clip_low": 1.0, "clip_high": 1e9},
    "PPO, no ratio": {"name": "ppo", "correction": "none"},
    "Online DPO": {"name": "online-dpo"},
    "Kimi k1.5": {"name": "kimi"},
    "OAPL, anchored at the reference": {"name": "oapl", "anchor": "reference"},
}


@dataclass(frozen=True)
class Found:
    objective: str
    data: Data
    seed: int
    distance_before: float
    distance: float
    reward: float


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = []
    for name, seed in product(OBJECTIVES, range(options.seeds)):
        for data in ("uniform", "reference"):
            found.append(Found(name, data, seed, *lead(loss_of(name), data, seed, options.steps)))
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "convergence.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(found[0])))
        writer.writeheader()
        writer.writerows(map(asdict, found))
    print("\n".join(markdown(found)))


def loss_of(name: str) -> Callable[[Groups], Loss]:
    config = ObjectiveConfig(**OBJECTIVES[name])
    objective, estimator = make_objective(config, max_tokens=toy.L), make_estimator(config)

    def loss(groups: Groups) -> Loss:
        if estimator:
            groups = estimator(groups, beta=BETA).of(0, groups)
        return objective(groups, beta=BETA)

    return loss


def lead(loss: Callable[[Groups], Loss], data: Data, seed: int, steps: int) -> tuple[float, float, float]:
    """Distances to the target before and after, and the mean reward after."""
    reference = quartered(seed)
    ref_NL = toy.token_logps(reference)
    target_N = toy.target_logps(ref_NL.sum(1), toy.ALL_DIFFER_N, BETA)
    logits = reference.clone().requires_grad_()
    value_R, log_z_P = (torch.zeros(n, dtype=torch.float64, requires_grad=True) for n in (toy.R, 1))
    optimizer = torch.optim.Adam([logits, value_R, log_z_P], lr=LEARNING_RATE)
    for _ in range(steps):
        optimizer.zero_grad()
        groups = everything(logits, ref_NL, data)
        value_PKT = value_R[toy.PREFIX_ROWS_NL][chosen(ref_NL, data)]
        loss(replace(groups, value_PKT=value_PKT, log_z_P=log_z_P)).value.backward()
        optimizer.step()
    logp_N = toy.sequence_logps(logits.detach())
    before = toy.total_variation(ref_NL.sum(1), target_N)
    return before, toy.total_variation(logp_N, target_N), float(logp_N.exp() @ toy.ALL_DIFFER_N)


def quartered(seed: int) -> Tensor:
    """Logits of a reference whose tokens have probabilities 1/2, 1/4 and 1/4, in any order."""
    order = torch.argsort(torch.rand(toy.R, toy.V, generator=torch.Generator().manual_seed(seed)), dim=1)
    return torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log()[order]


def everything(logits: Tensor, ref_NL: Tensor, data: Data) -> Groups:
    """The whole data set as one group."""
    uniform_NL, chosen_PK = torch.full_like(ref_NL, 1 / toy.V).log(), chosen(ref_NL, data)
    behaviour_NL = ref_NL if data == "reference" else uniform_NL
    reward_PK = toy.ALL_DIFFER_N[chosen_PK]
    return Groups(
        logp_PKT=toy.token_logps(logits)[chosen_PK],
        mask_PKT=torch.ones(*chosen_PK.shape, toy.L, dtype=torch.bool),
        reward_PK=reward_PK,
        ref_logp_PK=ref_NL[chosen_PK].sum(2),
        ref_logp_PKT=ref_NL[chosen_PK],
        behaviour_logp_PKT=behaviour_NL[chosen_PK],
        length_PK=torch.full(chosen_PK.shape, toy.L),
        batch_reward=float(reward_PK.mean()),
        batch_tokens=float(toy.L),
    )


def chosen(ref_NL: Tensor, data: Data) -> Tensor:
    """[1, K] each sequence as often as the data has it."""
    times_N = (64 * ref_NL.sum(1).exp()).round().long() if data == "reference" else torch.ones(toy.N, dtype=torch.long)
    return torch.repeat_interleave(torch.arange(toy.N), times_N)[None]


def markdown(found: Sequence[Found]) -> Iterator[str]:
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


def spread(values: Sequence[float]) -> str:
    """Mean and standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.2g} ± {error:.1g}"


if __name__ == "__main__":
    main()
