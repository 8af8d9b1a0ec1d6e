"""Prompts of a run: word problems for GSM8K, and the intake of prompts by a trainer."""

import json
from pathlib import Path

from flows.planning import resolve
from flows.roles import prompt_intake
from storage.runs.events import Events
from storage.runs.run import Run
from tba.config import Config, parse
from tba.tasks.registry import get_task
from tests.support.flows.live_roles import SMALL


def store_prompts(run: Run, tokenizer: object) -> None:
    config = parse(run.config)
    prompt_intake.store_prompts(run, config, get_task(config.task), tokenizer, Events(run, "trainer", 1))


def word_problems(folder: Path, split: str, n: int) -> Path:
    """Write rows like those of the original data, one of them far too long."""
    rows = [
        {"question": f"Ann has {i} pens and buys {split} {i + 1} more. How many?", "answer": f"So.\n#### {2 * i + 1}"}
        for i in range(n)
    ]
    rows.append({"question": "And then? " * 200, "answer": "No end.\n#### 0"})
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / f"{split}.jsonl"


def gsm8k(policy: Path, train: Path, test: Path) -> Config:
    changes = {
        "task.train": str(train),
        "task.test": str(test),
        "task.rule": "strict-hashes",
        "task.template": "vineppo",
        "model.publish_dtype": "float32",
        "search.searchers": 1,
        "search.max_response_tokens": 8,
        "training.responses_per_prompt": 8,
        "search.responses_per_prompt": 8,
        "training.steps": 4,
    }
    small = {key: value for key, value in SMALL.items() if key not in changes and "beta" not in key}
    return resolve.resolve("gsm8k", {"model.path": str(policy), **small, **changes})
