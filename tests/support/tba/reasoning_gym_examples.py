"""Tasks of reasoning_gym, and their prompts as searchers read them from storage."""

import json
from dataclasses import replace
from typing import Any

from benchmarks.harness.tiny_models import tiny_tokenizer
from tba.config import TaskConfig
from tba.tasks.reasoning_gym.library import Library
from tba.tasks.reasoning_gym.task import ReasoningGym
from tba.tasks.registry import get_task
from tba.types import Prompt, Response, Version

ONE_DIGIT = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
"""Settings of `chain_sum` with which it has 200 different problems."""
SUMS = {"name": "chain_sum", "settings": ONE_DIGIT}
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


def make_task(datasets: Any = SUMS, *, rule: str = "", library: Library | None = None, **options: Any) -> ReasoningGym:
    """Make a task. Tasks may share a library, because its process takes a second to start."""
    options = {"datasets": datasets, "train_size": 40, "test_size": 10, **options}
    task = get_task(TaskConfig(name="reasoning-gym", rule=rule, options=options))
    assert isinstance(task, ReasoningGym)
    task.library = library or task.library
    return task


def prompts_of(
    task: ReasoningGym, split: str = "train", *, template: str | None = None, max_tokens: int = 20_000
) -> list[Prompt]:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    prompts = task.prompts(split, [], tokenizer, max_tokens=max_tokens)
    return [replace(prompt, metadata=json.loads(json.dumps(prompt.metadata))) for prompt in prompts]


def response_of(text: str) -> Response:
    return Response(
        tokens=(5,), logps=(-1.0,), text=text, finished=True, temperature=1.0, top_p=1.0, seed=0,
        version_start=Version(0, 1), version_end=Version(0, 1), generate_seconds=0.1,
    )  # fmt: skip
