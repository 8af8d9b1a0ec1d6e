"""Whole responses to prompts. A response may have several turns: turns of the policy, and between them turns of the
task's environment.

A response of several turns is one trajectory. It has the tokens of all turns, and its loss mask says which of them the
policy wrote. Each turn of the policy ends with an end token. Only the end token of the last turn ends the response.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tba.errors import DataError
from tba.interfaces import Generator, InFlight, TakesTurns, Task
from tba.seeds import turn_seed
from tba.tasks.guard import asking
from tba.types import Prompt, Request, Response


def whole(task: Task, generator: Generator) -> InFlight:
    """Return an object that answers each request with a whole response: the generator itself, or, for a task that takes
    turns, a wrapper that alternates between the generator and the task."""
    return _Dialogues(task, generator) if isinstance(task, TakesTurns) else generator


def own(logps: tuple[float, ...], loss_mask: tuple[bool, ...] | None) -> tuple[float, ...]:
    """Replace the log-probabilities of tokens that the policy did not write by 0."""
    if loss_mask is None:
        return logps
    return tuple(logp if is_own else 0.0 for logp, is_own in zip(logps, loss_mask, strict=True))


class _Dialogues:
    """Many dialogues, none of which waits for another: when the policy ends a turn, the environment answers, and the
    policy's next turn is requested at once.

    A response is finished if the task ends it. It is truncated, and not finished, if a turn of the policy reaches the
    limit of the whole response. The same holds if the environment's answer leaves no room for another turn; this answer
    is then left out of the response.
    """

    def __init__(self, task: TakesTurns, generator: Generator):
        self.task, self.generator = task, generator
        self.max_response_tokens = generator.max_response_tokens
        self.going: dict[Request, _Dialogue] = {}  # by the request of the turn in flight

    def submit(self, requests: Sequence[Request]) -> None:
        self.going |= {request: _Dialogue(request) for request in requests}
        self.generator.submit(requests)

    def step(self) -> list[tuple[Request, Response]]:
        ended: list[tuple[Request, Response]] = []
        further: dict[Request, _Dialogue] = {}
        for request, turn in self.generator.step():
            dialogue = self.going.pop(request)
            dialogue.take(turn)
            if dialogue.goes_on(self.task, self.generator.tokenizer):
                further[dialogue.next_turn()] = dialogue
            else:
                ended.append((dialogue.request, dialogue.response))
        if further:
            self.going |= further
            self.generator.submit(list(further))
        return ended


class _Dialogue:
    """A response that is being generated, with the turns that have ended so far."""

    def __init__(self, request: Request):
        self.request = request
        self.said: Response | None = None  # all turns so far, of both sides

    @property
    def response(self) -> Response:
        assert self.said is not None, "a dialogue begins with a turn of the policy"
        return self.said

    def next_turn(self) -> Request:
        before, turn = self.response, len(self.response.turns) // 2
        return replace(
            self.request,
            prompt=replace(self.request.prompt, tokens=self.request.prompt.tokens + before.tokens),
            seed=turn_seed(self.request.seed, turn),
            limit=self.request.limit - len(before.tokens),
        )

    def take(self, turn: Response) -> None:
        """Append a turn of the policy."""
        if self.said is None:
            self.said = replace(turn, turns=(turn.text,))
            return
        self._add(turn.tokens, turn.logps, turn.text, own=True)
        self.said = replace(
            self.said,
            finished=turn.finished,
            version_end=turn.version_end,
            generate_seconds=self.said.generate_seconds + turn.generate_seconds,
        )

    def goes_on(self, task: TakesTurns, tokenizer: Any) -> bool:
        """Ask the environment for its turn and append the turn to the response. Return False if the response has ended
        instead."""
        prompt, before = self.request.prompt, self.response
        if not before.finished:
            return False
        with asking(task, "reply", prompt):
            reply = task.reply(prompt, before.turns, tokenizer)
        if reply is None:
            return False
        tokens = _checked(reply, prompt)
        if len(before.tokens) + len(tokens) >= self.request.limit:
            self.said = replace(before, finished=False)
            return False
        self._add(tokens, (0.0,) * len(tokens), tokenizer.decode(tokens, skip_special_tokens=True), own=False)
        return True

    def _add(self, tokens: tuple[int, ...], logps: tuple[float, ...], text: str, *, own: bool) -> None:
        before = self.response
        mask = (True,) * len(before.tokens) if before.loss_mask is None else before.loss_mask
        self.said = replace(
            before,
            tokens=before.tokens + tokens,
            logps=before.logps + logps,
            loss_mask=mask + (own,) * len(tokens),
            text=before.text + text,
            turns=(*before.turns, text),
        )


def _checked(reply: Sequence[int], prompt: Prompt) -> tuple[int, ...]:
    """Return the environment's reply as a tuple of token ids. Raise DataError if the task returned something else, such
    as a text, or the whole output of a tokenizer instead of its `input_ids`."""
    if isinstance(reply, str) or not all(isinstance(token, int) for token in reply):
        raise DataError(f"prompt {prompt.prompt_id!r}: reply must be tokens or None, got {reply!r:.80}")
    return tuple(reply)
