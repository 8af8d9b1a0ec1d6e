"""Rewards of many responses, from tasks that score one at a time and from those that score together."""

from collections.abc import Sequence

from tba.errors import ConfigError, DataError
from tba.interfaces import ScoresTogether, Task
from tba.tasks.guard import asking
from tba.types import Prompt, Response, Reward


class Scoring:
    """Asks a task for rewards; with `remember`, only once for the same response to the same prompt, of those it was
    asked about last."""

    def __init__(self, task: Task, *, remember: int = 0):
        check_can_remember(task, remember)
        self.task, self.remember = task, remember
        self.known: dict[tuple[str, tuple[int, ...], bool], Reward] = {}

    def rewards(self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Response]]) -> list[list[Reward]]:
        """For each prompt its responses'."""
        asked = [(prompt, response) for prompt, group in zip(prompts, responses, strict=True) for response in group]
        found = iter(self._remembered(asked) if self.remember else self._new(asked))
        return [[next(found) for _ in group] for group in responses]

    def _remembered(self, asked: Sequence[tuple[Prompt, Response]]) -> list[Reward]:
        keys = [(prompt.prompt_id, response.tokens, response.finished) for prompt, response in asked]
        unknown = {key: pair for key, pair in zip(keys, asked, strict=True) if key not in self.known}
        new = self._new(list(unknown.values())) if unknown else []
        rewards = self.known | dict(zip(unknown, new, strict=True))
        for key in keys:
            self.known.pop(key, None)  # so that what was asked about last comes last
            self.known[key] = rewards[key]
        for key in list(self.known)[: -self.remember]:
            del self.known[key]
        return [rewards[key] for key in keys]

    def _new(self, asked: Sequence[tuple[Prompt, Response]]) -> Sequence[Reward]:
        """A number alone, or None where a task forgets to return, is an easy mistake."""
        if isinstance(self.task, ScoresTogether):
            with asking(self.task, "rewards"):
                found = list(self.task.rewards(asked))
        else:
            found = [self._one(prompt, response) for prompt, response in asked]
        if len(found) != len(asked):
            raise DataError(f"task {self.task.name!r} gave {len(found)} rewards for {len(asked)} responses")
        if others := [it for it in found if not isinstance(it, Reward)]:
            raise DataError(f"task {self.task.name!r}: a reward must be a tba.types.Reward, got {others[0]!r:.80}")
        return found

    def _one(self, prompt: Prompt, response: Response) -> Reward:
        with asking(self.task, "reward", prompt):
            return self.task.reward(prompt, response)


def check_can_remember(task: Task, remember: int) -> None:
    if remember and getattr(task, "rewards_vary", False):
        raise ConfigError(
            f"search.remembered_rewards must be 0 for task {task.name!r}, whose rewards vary for the same response, "
            f"got {remember}"
        )
