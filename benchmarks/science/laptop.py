"""Compare the wall-clock time to 0.50 accuracy of a real language model on two cores: asynchronous, one version behind,
synchronous, and TRL's trainers.

    python -m benchmarks.science.laptop ROOT [--only ARM …] [--seeds 0 …] [--goal 0.5] [--trl FOLDER] [--out FILE.csv]
    python -m benchmarks.science.laptop --show            only show the table of stored results

It needs the packages of requirements-laptop.txt, vLLM for our searchers, and TRL in a folder of its own, as `speed.py`
says. The policy is SmolLM2-135M-Instruct, the task that of the preset `reasoning-gym`: sums of two numbers. All arms
have the same start, prompts, rewards, cores and 128 responses per step: 8 to each of 16 prompts, or 2 to each of 64 for
methods that compare pairs. All arms use AdamW (0.9, 0.95) in float32, bfloat16 products, clipping at 1, a warm-up of 5
steps and then a constant learning rate. Our arms learn with TBA', beta 0.05 and the newest responses, share the two
cores between roles, and generate with vLLM; synchronous ones give both cores to the role that works. The asynchronous
searcher generates at most two rounds with a version, because the cores are the trainer's too. TRL's trainers generate
with transformers and use two threads; their other settings keep their defaults. `race.py` says what counts as time, and
how rates are chosen.

In the paced arms each round of a searcher, and each batch of TRL, waits 1.5 seconds more, like an engine elsewhere.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.science.race import Arm, Race, main

ASYNCHRONOUS: Mapping[str, Any] = {
    "sync.lag": "null", "sampling.recent_share": 0.5, "search.rounds_per_version": 2
}  # fmt: skip
ONE_BEHIND: Mapping[str, Any] = {"sync.lag": 1}
SYNCHRONOUS: Mapping[str, Any] = {"sync.lag": 0}
LATENCY = 1.5  # seconds
PACE: Mapping[str, Any] = {"task.options.latency": LATENCY}
PACED = "benchmarks.science.paced:PacedReasoningGym"

LAPTOP = Race(
    preset="reasoning-gym",
    arms={
        "asynchronous": Arm(settings=ASYNCHRONOUS, threads=("shared",), steps=64),
        "one version behind": Arm(settings=ONE_BEHIND, threads=("shared",), steps=64),
        "synchronous": Arm(settings=SYNCHRONOUS, threads=("2",), steps=64),
        "TRL's GRPO": Arm(trl="grpo", threads=("2",), steps=96),
        "TRL's RLOO": Arm(trl="rloo", threads=("2",), steps=96),
        "TRL's online DPO": Arm(trl="online-dpo", threads=("2",), steps=96),
        "asynchronous, 3 paced searchers": Arm(
            settings={**ASYNCHRONOUS, **PACE, "search.searchers": 3}, task=PACED, steps=64, rates_of="asynchronous"
        ),
        "synchronous, a paced searcher": Arm(
            settings={**SYNCHRONOUS, **PACE}, task=PACED, steps=64, rates_of="synchronous"
        ),
        "TRL's GRPO, paced": Arm(trl="grpo", latency=LATENCY, steps=96, rates_of="TRL's GRPO"),
    },
    common={
        "objective.beta_start": 0.05,
        "objective.beta_end": 0.05,
        "objective.correction": "cap",
        "objective.negative_share": 1.0,
        "sampling.recent_share": 1.0,
        "sampling.inv_temp": 0.0,
        "sampling.copies": "all",
        "sampling.mean_reward_between": "null",
        "training.responses_per_prompt": 8,
        "training.schedule": "warmup-stable-decay",
        "training.decay_steps": 0,
        "training.warmup_steps": 5,
        "training.adam_beta1": 0.9,
        "training.adam_beta2": 0.95,
        "training.prompts_per_step": 16,
        "search.prompts_per_round": 16,
        "search.initial_fill": 128,
        "search.temperature": 1.0,
        "sync.every": 1,
        "sync.checkpoint_every": 20,
        "evaluation.every": 4,
        "evaluation.prompts": 1,
        "evaluation.samples": 0,
        "evaluation.pass_at": "[]",
    },
    scoring={"evaluation.prompts": 200, "evaluation.samples": 2, "evaluation.pass_at": ()},
    trl={
        "prompts": 16, "responses": 8, "prompt_tokens": 96, "response_tokens": 12, "warmup": 5,
        "adam_beta2": 0.95, "clip_norm": 1.0, "bfloat16": True, "rows_at_once": 32,
    },
    rates=(5e-6, 1e-5, 2e-5),
    goal=0.5,
    scored_every=4,
    results=Path("docs/results/laptop.csv"),
    keeps_weights=False,
)  # fmt: skip

if __name__ == "__main__":
    main(LAPTOP, __doc__)
