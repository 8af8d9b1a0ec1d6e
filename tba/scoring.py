"""Rewards of many responses, from tasks that score one at a time and from those that score together."""

from collections.abc import Sequence

from tba.errors import RunFailed
from tba.interfaces import ScoresTogether, Task
from tba.types import Prompt, Response, Reward


def rewards(task: Task, prompts: Sequence[Prompt], responses: Sequence[Sequence[Response]]) -> list[list[Reward]]:
    """For each prompt its responses'."""
    asked = [(prompt, response) for prompt, group in zip(prompts, responses, strict=True) for response in group]
    if isinstance(task, ScoresTogether):
        found = task.rewards(asked)
        if len(found) != len(asked):
            raise RunFailed(f"task {task.name!r} gave {len(found)} rewards for {len(asked)} responses")
    else:
        found = [task.reward(prompt, response) for prompt, response in asked]
    flat = iter(found)
    return [[next(flat) for _ in group] for group in responses]
