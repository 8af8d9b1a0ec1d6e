"""Compute the rewards of many responses, whether a task scores one response at a time or many together."""

from collections.abc import Sequence

from tba.errors import ConfigError, DataError
from tba.interfaces import ScoresTogether, Task
from tba.tasks.guard import asking
from tba.types import Prompt, Response, Reward


class Scoring:
    """Asks a task for rewards. The rewards of the last `remember` distinct responses are remembered, so that the task
    is not asked for them again. Equal responses to different prompts are distinct."""

    def __init__(self, task: Task, *, remember: int = 0):
        check_can_remember(task, remember)
        self.task, self.remember = task, remember
        self.known: dict[tuple[str, tuple[int, ...], bool], Reward] = {}

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Response]]) -> list[list[Reward]]:
        """Return one list per prompt with one reward per response."""
        asked = [(prompt, response) for prompt, group in zip(prompts, responses, strict=True) for response in group]
        rewards = iter(self._remembered(asked) if self.remember else self._new(asked))
        return [[next(rewards) for _ in group] for group in responses]

    def _remembered(self, asked: Sequence[tuple[Prompt, Response]]) -> list[Reward]:
        keys = [(prompt.prompt_id, response.tokens, response.finished) for prompt, response in asked]
        unknown = {key: pair for key, pair in zip(keys, asked, strict=True) if key not in self.known}
        new = self._new(list(unknown.values())) if unknown else []
        rewards = self.known | dict(zip(unknown, new, strict=True))
        for key in keys:
            self.known.pop(key, None)  # the dict stays sorted: the responses of the newest call are last
            self.known[key] = rewards[key]
        for key in list(self.known)[: -self.remember]:
            del self.known[key]
        return [rewards[key] for key in keys]

    def _new(self, asked: Sequence[tuple[Prompt, Response]]) -> Sequence[Reward]:
        """Return the rewards that the task computes. Raise DataError unless they are one `Reward` per response: tasks
        easily return a plain number, or None because a `return` is missing."""
        if isinstance(self.task, ScoresTogether):
            with asking(self.task, "rewards"):
                rewards = list(self.task.rewards(asked))
        else:
            rewards = [self._one(prompt, response) for prompt, response in asked]
        if len(rewards) != len(asked):
            raise DataError(f"task {self.task.name!r} gave {len(rewards)} rewards for {len(asked)} responses")
        if others := [reward for reward in rewards if not isinstance(reward, Reward)]:
            raise DataError(f"task {self.task.name!r}: a reward must be a tba.types.Reward, got {others[0]!r:.80}")
        return rewards

    def _one(self, prompt: Prompt, response: Response) -> Reward:
        with asking(self.task, "reward", prompt):
            return self.task.reward(prompt, response)


def check_can_remember(task: Task, remember: int) -> None:
    if remember and getattr(task, "rewards_vary", False):
        raise ConfigError(
            f"search.remembered_rewards must be 0 for task {task.name!r}, whose rewards vary for the same response, "
            f"got {remember}"
        )
