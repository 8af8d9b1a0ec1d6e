"""Trains with a TRL trainer, for `race.py`. Prints the learning curve, a list of [step, seconds of training, accuracy],
and the tokens per second of each side, as JSON.

python -m benchmarks.science.race_trl '{"trainer": "grpo", "preset": "quickstart", "seed": 0, "rate": 3e-4, …}'
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.utils import logging

from benchmarks.science.lagged import make_scores, start_of
from tba.presets import preset
from tba.tasks.registry import get_task
from tba.types import Prompt, Response, Version


class Clock(TrainerCallback):
    """Counts the seconds of training alone, and of them the seconds of generating. Scores the policy every few steps,
    and ends training at the goal."""

    def __init__(self, asked: Mapping[str, Any], config: Any, folder: Path):
        self.asked, self.folder, self.score = asked, folder, make_scores(config)
        self.curve: list[tuple[int, float, float]] = []
        self.seconds, self.since, self.tokens = 0.0, 0.0, 0
        self.generating, self.waited = 0.0, 0.0  # parts of `seconds`

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._look(0, kwargs["model"])

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seconds += time.monotonic() - self.since
        self.since = time.monotonic()
        if state.global_step % self.asked["scored_every"] == 0:
            self._look(state.global_step, kwargs["model"])
            control.should_training_stop |= self.curve[-1][2] >= self.asked["goal"]

    def watch(self, model: Any) -> None:
        """Count the seconds that the model generates."""
        generate = model.generate

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            try:
                return generate(*args, **kwargs)
            finally:
                self.generating += time.monotonic() - began

        model.generate = timed

    def told(self) -> dict[str, Any]:
        learning = self.seconds - self.generating - self.waited
        return {
            "curve": self.curve,
            "generated_per_second": self.tokens / self.generating,
            "learned_per_second": self.tokens / learning,
        }

    def _look(self, step: int, model: Any) -> None:
        model.save_pretrained(self.folder)
        self.curve.append((step, self.seconds, self.score(self.folder)["sampled"]))
        self.since = time.monotonic()


def main() -> None:
    asked = json.loads(sys.argv[1])
    torch.set_num_threads(asked["threads"])
    logging.disable_progress_bar()
    config = preset(asked["preset"]).replace({"seed": asked["seed"], **asked["scoring"]})
    task, start = get_task(config.task), start_of(config)
    tokenizer = AutoTokenizer.from_pretrained(start)
    prompts = task.prompts("train", [], tokenizer, max_tokens=asked["prompt_tokens"])
    known = {prompt.text: prompt for prompt in prompts}
    with tempfile.TemporaryDirectory(prefix="tba-") as scratch:
        clock = Clock(asked, config, Path(scratch) / "policy")
        tokenizer.save_pretrained(clock.folder)

        def reward(
            prompts: list[str], completions: list[str], completion_ids: Any = None, **kwargs: Any
        ) -> list[float]:
            read = completion_ids or tokenizer(completions, add_special_tokens=False)["input_ids"]
            clock.tokens += sum(map(len, read))
            time.sleep(asked["latency"])
            clock.waited += asked["latency"]
            return [
                task.reward(known[prompt], response(text)).value
                for prompt, text in zip(prompts, completions, strict=True)
            ]

        model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
        clock.watch(model)
        trainer = make_trainer(asked, scratch, model, tokenizer, prompts, reward)
        trainer.add_callback(clock)
        trainer.train()
    print(json.dumps(clock.told()))


def response(text: str) -> Response:
    """Return a response with this text. Rewards read nothing else of it."""
    version = Version(0, 1)
    return Response(
        tokens=(0,), logps=(0.0,), text=text, finished=True, temperature=1.0, top_p=1.0, seed=0,
        version_start=version, version_end=version, generate_seconds=0.0,
    )  # fmt: skip


def make_trainer(
    asked: Mapping[str, Any], folder: str, model: Any, tokenizer: Any, prompts: Sequence[Prompt], reward: Any
) -> Any:
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
        "warmup_steps": asked["warmup"],
        "temperature": asked.get("temperature", 1.0),
        "adam_beta2": asked.get("adam_beta2", 0.999),
        "max_grad_norm": asked.get("clip_norm", 1.0),
        "use_cpu": True,
        "bf16": asked.get("bfloat16", False),
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }
    count, longest = asked["prompts"] * asked["responses"], asked["response_tokens"]
    at_once = asked.get("rows_at_once", count)
    groups = {
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": count // at_once,
        "num_generations": asked["responses"],
        "max_completion_length": longest,
    }
    pairs = {
        "per_device_train_batch_size": at_once // 2,
        "gradient_accumulation_steps": count // at_once,
        "max_new_tokens": longest,
        "max_length": asked["prompt_tokens"] + longest,
    }
    makers = {
        "grpo": (GRPOTrainer, GRPOConfig, groups),
        "rloo": (RLOOTrainer, RLOOConfig, groups),
        "online-dpo": (OnlineDPOTrainer, OnlineDPOConfig, pairs),
    }
    trainer, config, batch = makers[asked["trainer"]]
    return trainer(
        model=model,
        reward_funcs=reward,
        args=config(**common, **batch),
        train_dataset=Dataset.from_list([{"prompt": prompt.text} for prompt in prompts]),
        processing_class=tokenizer,
    )


if __name__ == "__main__":
    main()
