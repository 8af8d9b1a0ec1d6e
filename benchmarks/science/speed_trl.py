"""Trains with a TRL trainer on the quickstart task, for benchmarks/science/speed.py. Prints the learning curve as JSON:
a list of [step, seconds of training, accuracy].

python -m benchmarks.science.speed_trl '{"arm": "TRL'"'"'s GRPO", "seed": 0, "rate": 3e-4, …}'
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging

from benchmarks.science.lagged import make_scores, start_of
from tba.presets import preset
from tba.tasks.registry import get_task

PROMPTS, RESPONSES, LONGEST = 32, 8, 16


class Clock(TrainerCallback):
    """Counts the seconds of training alone. Scores the policy every few steps, and ends training at the goal."""

    def __init__(self, asked: dict[str, Any], folder: Path):
        self.asked, self.folder = asked, folder
        self.score = make_scores(preset("quickstart").replace({"seed": asked["seed"]}))
        self.curve: list[tuple[int, float, float]] = []
        self.seconds, self.since = 0.0, 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look(0, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds += time.monotonic() - self.since
        self.since = time.monotonic()
        if state.global_step % self.asked["scored_every"] == 0:
            self._look(state.global_step, kwargs["model"])
            control.should_training_stop |= self.curve[-1][2] >= self.asked["goal"]

    def _look(self, step: int, model: Any) -> None:
        model.save_pretrained(self.folder)
        self.curve.append((step, self.seconds, self.score(self.folder)))
        self.since = time.monotonic()


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    logging.disable_progress_bar()
    config = preset("quickstart").replace({"seed": asked["seed"]})
    task, start = get_task(config.task), start_of(config)
    tokenizer = AutoTokenizer.from_pretrained(start)
    prompts = task.prompts("train", [], tokenizer, max_tokens=LONGEST)
    answers = {prompt.text: prompt for prompt in prompts}
    with tempfile.TemporaryDirectory(prefix="tba-") as scratch:
        clock = Clock(asked, Path(scratch) / "policy")
        tokenizer.save_pretrained(clock.folder)

        def reward(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
            return [
                float(completion == answers[prompt].answer)
                for prompt, completion in zip(prompts, completions, strict=True)
            ]

        trainer = make_trainer(asked, scratch, AutoModelForCausalLM.from_pretrained(start), tokenizer, prompts, reward)
        trainer.add_callback(clock)
        trainer.train()
    print(json.dumps(clock.curve))


def make_trainer(asked: dict[str, Any], folder: str, model: Any, tokenizer: Any, prompts: Any, reward: Any) -> Any:
    from datasets import Dataset  # pyright: ignore[reportMissingImports]
    from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer  # pyright: ignore[reportMissingImports]
    from trl.experimental.online_dpo import (  # pyright: ignore[reportMissingImports]
        OnlineDPOConfig,
        OnlineDPOTrainer,
    )

    common: dict[str, Any] = {
        "output_dir": folder,
        "seed": asked["seed"],
        "max_steps": asked["steps"],
        "learning_rate": asked["rate"],
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": 10,
        "temperature": 1.0,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    groups = {
        "per_device_train_batch_size": PROMPTS * RESPONSES,
        "num_generations": RESPONSES,
        "max_completion_length": LONGEST,
    }
    pairs = {
        "per_device_train_batch_size": PROMPTS * RESPONSES // 2,
        "max_new_tokens": LONGEST,
        "max_length": 2 * LONGEST,
    }
    makers = {
        "TRL's GRPO": (GRPOTrainer, GRPOConfig, groups),
        "TRL's RLOO": (RLOOTrainer, RLOOConfig, groups),
        "TRL's online DPO": (OnlineDPOTrainer, OnlineDPOConfig, pairs),
    }
    trainer, config, batch = makers[asked["arm"]]
    return trainer(
        model=model,
        reward_funcs=reward,
        args=config(**common, **batch),
        train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in prompts]),
        processing_class=tokenizer,
    )


if __name__ == "__main__":
    main()
