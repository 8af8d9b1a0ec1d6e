"""Whole responses to prompts, which may take several turns: the policy's, and between them what the task answers.

A response of several turns is one trajectory. Its tokens are those of all turns; its loss mask says which of them the
policy wrote. Each turn of the policy ends with an end token of its own, which is a token like any other unless it is
the last: that one ends the response.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from tba.asking import asking
from tba.errors import DataError
from tba.interfaces import Generator, TakesTurns, Task
from tba.prompts import turn_seed
from tba.types import Prompt, Response


def generate(
    task: Task,
    generator: Generator,
    prompts: Sequence[Prompt],
    seeds: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    temperature: float,
    top_p: float = 1.0,
    between: Callable[[], object] = lambda: None,
) -> list[list[Response]]:
    """One list per prompt, one response per seed, as a generator gives them. Of a task that takes turns, all responses
    that still go on are continued together, each from its prompt and everything said so far.

    A response is finished if the task says that it is. It is truncated, and not finished, where a turn of the policy
    reaches the limit of `max_tokens` for the whole response, or where the environment's answer leaves no room for
    another turn: that answer is then left out.
    """
    if not isinstance(task, TakesTurns):
        return generator.generate(prompts, seeds, temperature=temperature, top_p=top_p, between=between)
    limits = [max_tokens] * len(prompts)
    first = generator.generate(prompts, seeds, temperature=temperature, top_p=top_p, limits=limits, between=between)
    groups = [[_Dialogue(p, response) for response in group] for p, group in zip(prompts, first, strict=True)]
    going = [dialogue for group in groups for dialogue in group]
    for turn in count(1):
        going = [dialogue for dialogue in going if dialogue.goes_on(task, generator.tokenizer, max_tokens)]
        if not going:
            return [[dialogue.response for dialogue in group] for group in groups]
        said = generator.generate(
            [dialogue.so_far for dialogue in going],
            [[turn_seed(dialogue.response.seed, turn)] for dialogue in going],
            temperature=temperature,
            top_p=top_p,
            limits=[max_tokens - len(dialogue.response.tokens) for dialogue in going],
            between=between,
        )
        for dialogue, [response] in zip(going, said, strict=True):
            dialogue.take(response)
    raise AssertionError("a turn has at least 1 token, so that no response goes on for ever")


def own(logps: tuple[float, ...], loss_mask: tuple[bool, ...] | None) -> tuple[float, ...]:
    """0 for tokens that the policy did not write."""
    if loss_mask is None:
        return logps
    return tuple(logp if is_own else 0.0 for logp, is_own in zip(logps, loss_mask, strict=True))


@dataclass
class _Dialogue:
    """A response in the making, of whole turns."""

    prompt: Prompt
    response: Response

    def __post_init__(self) -> None:
        self.response = replace(self.response, turns=(self.response.text,))

    @property
    def so_far(self) -> Prompt:
        return replace(self.prompt, tokens=self.prompt.tokens + self.response.tokens)

    def goes_on(self, task: TakesTurns, tokenizer: Any, max_tokens: int) -> bool:
        """Whether it is the policy's turn again: with what the environment says now taken in."""
        if not self.response.finished:
            return False
        with asking(task, "reply", self.prompt):
            reply = task.reply(self.prompt, self.response.turns, tokenizer)
        if reply is None:
            return False
        tokens = _checked(reply, self.prompt)
        if len(self.response.tokens) + len(tokens) >= max_tokens:
            self.response = replace(self.response, finished=False)
            return False
        self._add(tokens, (0.0,) * len(tokens), tokenizer.decode(tokens, skip_special_tokens=True), own=False)
        return True

    def take(self, said: Response) -> None:
        """The policy's next turn."""
        self._add(said.tokens, said.logps, said.text, own=True)
        self.response = replace(
            self.response,
            finished=said.finished,
            version_end=said.version_end,
            generate_seconds=self.response.generate_seconds + said.generate_seconds,
        )

    def _add(self, tokens: tuple[int, ...], logps: tuple[float, ...], text: str, *, own: bool) -> None:
        before = self.response
        mask = (True,) * len(before.tokens) if before.loss_mask is None else before.loss_mask
        self.response = replace(
            before,
            tokens=before.tokens + tokens,
            logps=before.logps + logps,
            loss_mask=mask + (own,) * len(tokens),
            text=before.text + text,
            turns=(*before.turns, text),
        )


def _checked(reply: Sequence[int], prompt: Prompt) -> tuple[int, ...]:
    """A text, or what a tokenizer returns beside its tokens, is an easy mistake."""
    if isinstance(reply, str) or not all(isinstance(token, int) for token in reply):
        raise DataError(f"prompt {prompt.prompt_id!r}: reply must be tokens or None, got {reply!r:.80}")
    return tuple(reply)
