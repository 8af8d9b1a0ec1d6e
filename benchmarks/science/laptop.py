"""Compare the wall-clock time to 0.70 accuracy of a real language model on two cores: asynchronous, one version behind,
synchronous, and TRL's trainers.

    python -m benchmarks.science.laptop ROOT [--only ARM …] [--seeds 0 …] [--goal 0.7] [--trl FOLDER] [--out FILE.csv]
    python -m benchmarks.science.laptop --show            only show the table of stored results

It needs the packages of requirements-laptop.txt, vLLM for our searchers, and TRL in a folder of its own, as `speed.py`
says. The policy is SmolLM2-135M-Instruct, the task that of the preset `reasoning-gym`: sums of two numbers. All arms
have the same start, prompts, rewards and cores, and generate 128 responses per step: 8 to each of 16 prompts, or 2 to
each of 64 for methods that compare pairs. They sample at temperature 0.7 and use AdamW (0.9, 0.95) in float32, bfloat16
products, clipping at 1, a warm-up of 5 steps and then a constant learning rate.

Our arms have the settings of the preset: they learn from the better of 4 responses to each of 32 problems, drawn from
the whole run. They differ only in who waits for whom, so all take the rate that is best one version behind. They share
the two cores between roles and generate with vLLM; the synchronous ones give both cores to the role that works. The
asynchronous searcher generates at most two rounds with a version, because the cores are the trainer's too. TRL's
trainers generate with transformers and use two threads; their other settings keep their defaults.

`race.py` says what counts as time, and how rates are chosen.

In the paced arms each round of a searcher, and each batch of TRL, waits 1.5 seconds more, like an engine elsewhere.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.science.race import Arm, Race, main

ASYNCHRONOUS: Mapping[str, Any] = {"sync.lag": "null", "search.rounds_per_version": 2}
ONE_BEHIND: Mapping[str, Any] = {"sync.lag": 1}
SYNCHRONOUS: Mapping[str, Any] = {"sync.lag": 0}
LATENCY = 1.5  # seconds
PACE: Mapping[str, Any] = {"task.options.latency": LATENCY}
PACED = "benchmarks.science.paced:PacedReasoningGym"

LAPTOP = Race(
    preset="reasoning-gym",
    arms={
        "one version behind": Arm(settings=ONE_BEHIND, threads=("shared",), steps=40),
        "asynchronous": Arm(settings=ASYNCHRONOUS, steps=40, rates_of="one version behind"),
        "synchronous": Arm(settings=SYNCHRONOUS, other_threads="2", steps=40, rates_of="one version behind"),
        "TRL's GRPO": Arm(trl="grpo", threads=("2",), steps=40),
        "TRL's RLOO": Arm(trl="rloo", threads=("2",), steps=40),
        "TRL's online DPO": Arm(trl="online-dpo", threads=("2",), steps=40),
        "asynchronous, 3 paced searchers": Arm(
            settings={**ASYNCHRONOUS, **PACE, "search.searchers": 3}, task=PACED, steps=40,
            rates_of="one version behind",
        ),
        "synchronous, a paced searcher": Arm(
            settings={**SYNCHRONOUS, **PACE}, other_threads="2", task=PACED, steps=40, rates_of="one version behind"
        ),
        "TRL's GRPO, paced": Arm(trl="grpo", latency=LATENCY, steps=40, rates_of="TRL's GRPO"),
    },
    common={
        "training.schedule": "warmup-stable-decay",
        "training.decay_steps": 0,
        "training.warmup_steps": 5,
        "sync.checkpoint_every": 20,
        "evaluation.every": 4,
        "evaluation.prompts": 1,
        "evaluation.samples": 0,
        "evaluation.pass_at": "[]",
    },
    scoring={"evaluation.prompts": 200, "evaluation.samples": 2, "evaluation.pass_at": ()},
    trl={
        "prompts": 16, "responses": 8, "prompt_tokens": 96, "response_tokens": 12, "temperature": 0.7, "warmup": 5,
        "adam_beta2": 0.95, "clip_norm": 1.0, "bfloat16": True, "rows_at_once": 32,
    },
    rates=(3e-5, 1e-4, 1e-5),
    further_rates=(1e-6, 3e-6, 3e-4, 1e-3),
    goal=0.7,
    scored_every=4,
    results=Path("docs/results/laptop.csv"),
    keeps_weights=False,
)  # fmt: skip

if __name__ == "__main__":
    main(LAPTOP, __doc__)
