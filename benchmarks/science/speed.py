"""Compare the wall-clock time to 0.90 accuracy on the quickstart task: asynchronous, synchronous and TRL's trainers.

    python -m benchmarks.science.speed ROOT [--only ARM …] [--seeds 0 …] [--goal 0.9] [--trl FOLDER] [--out FILE.csv]
    python -m benchmarks.science.speed --show            only show the table of stored results

TRL and its dependencies are not among our requirements. --trl names a folder into which they were installed by

    pip install --no-deps --target FOLDER -r benchmarks/science/requirements-trl.txt

Our arms are asynchronous (no role waits for another), one version behind (`sync.lag` = 1: searchers generate with the
version before the newest while the trainer learns), and synchronous (`sync.lag` = 0). "Anchored" is trajectory balance
with `objective.anchor=behaviour` and beta 0.25; all other arms have the preset's beta of 0.05. All arms have the same
base policies, prompts, rewards, cores and 256 responses per step: 8 to each of 32 prompts, or 2 to each of 128 for
methods that compare pairs. All arms use AdamW (0.9, 0.999), a warm-up of 10 steps and then a constant learning rate.
TRL's trainers keep their other defaults, except memory and precision settings that would cost them time here. `race.py`
says what counts as time, and how rates and threads are chosen. Where only one role works at a time, more threads could
help, so one or two threads are tried.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.science.race import Arm, Race, main

IN_STEP: Mapping[str, Any] = {"sync.lag": 0, "sync.every": 1, "sampling.recent_share": 1.0}
ANCHORED: Mapping[str, Any] = {
    "objective.anchor": "behaviour", "objective.beta_start": 0.25, "objective.beta_end": 0.25
}  # fmt: skip
LATENCY = 1.5  # seconds
PACE: Mapping[str, Any] = {"task.options.latency": LATENCY}
PACED = "benchmarks.science.paced:PacedQuickstart"
EITHER = ("1", "2")

QUICKSTART = Race(
    preset="quickstart",
    arms={
        "asynchronous TB, anchored": Arm(settings=ANCHORED, steps=320),
        "asynchronous TBA'": Arm(settings={"objective.name": "tba-prime"}, steps=320),
        "asynchronous TB": Arm(steps=320),
        "one version behind, TBA'": Arm(
            settings={"objective.name": "tba-prime", **IN_STEP, "sync.lag": 1}, steps=160
        ),
        "synchronous TB": Arm(settings=IN_STEP, threads=EITHER, steps=96),
        "TRL's GRPO": Arm(trl="grpo", threads=EITHER, steps=160),
        "TRL's RLOO": Arm(trl="rloo", threads=EITHER, steps=160),
        "TRL's online DPO": Arm(trl="online-dpo", threads=EITHER, steps=160),
        "synchronous TB, a paced searcher": Arm(
            settings={**IN_STEP, **PACE}, task=PACED, steps=96, rates_of="synchronous TB"
        ),
        "synchronous TB, 3 paced searchers": Arm(
            settings={**IN_STEP, **PACE, "search.searchers": 3, "search.prompts_per_round": 11},
            task=PACED, steps=96, rates_of="synchronous TB",
        ),
        "asynchronous TB, anchored, 3 paced searchers": Arm(
            settings={**ANCHORED, **PACE, "search.searchers": 3},
            task=PACED, steps=320, rates_of="asynchronous TB, anchored",
        ),
        "TRL's GRPO, paced": Arm(trl="grpo", latency=LATENCY, steps=160, rates_of="TRL's GRPO"),
    },
    common={
        "training.schedule": "warmup-stable-decay",
        "training.decay_steps": 0,
        "training.adam_beta1": 0.9,
        "search.prompts_per_round": 32,
        "search.initial_fill": 256,
        "sampling.copies": "all",
        "sync.keep_versions": 1000,
        "evaluation.prompts": 1,
    },
    scoring={},
    trl={"prompts": 32, "responses": 8, "prompt_tokens": 16, "response_tokens": 16, "warmup": 10},
    rates=(3e-4, 6e-4, 1.2e-3),
    further_rates=(7.5e-5, 1.5e-4, 2.4e-3),
    goal=0.9,
    scored_every=8,
    results=Path("docs/results/speed.csv"),
)  # fmt: skip

if __name__ == "__main__":
    main(QUICKSTART, __doc__)
