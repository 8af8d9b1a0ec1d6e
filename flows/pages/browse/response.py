"""The tokens of a response as a page shows them: their texts, and the log-ratio of each."""

from dataclasses import dataclass
from typing import Any

from flows.pages.browse.tokens import Tokens
from flows.pages.values import shade, written

_LEAST_SCALE = 0.25  # nats: a smaller log-ratio never has the full colour
_MOST_TOKENS = 8000


@dataclass(frozen=True)
class Token:
    number: int
    text: str | None  # None without a tokenizer; empty where a character goes on in the next token
    css: str
    tooltip: str  # what the page tells when a reader points at the token


@dataclass(frozen=True)
class Response:
    shown: list[Token]
    count: int
    largest: float  # log-ratio that has the full colour
    has_texts: bool
    has_masked: bool


def read_response(trajectory: dict[str, Any], tokenizer: Tokens) -> Response | None:
    """Return the tokens of a trajectory; None if they are not stored any more."""
    if trajectory["response_tokens"] is None:
        return None
    numbers = trajectory["response_tokens"][:_MOST_TOKENS]
    texts = tokenizer.texts(numbers)
    ratios = log_ratios(trajectory)[:_MOST_TOKENS]
    masks = trajectory["loss_mask"] or [True] * len(numbers)
    largest = max([_LEAST_SCALE, *(abs(ratio) for ratio, own in zip(ratios, masks, strict=False) if own)])
    shown = []
    for at, number in enumerate(numbers):
        ratio = ratios[at] if at < len(ratios) else None
        own = masks[at] if at < len(masks) else True
        css = shade(ratio, largest) if own else "masked"
        shown.append(Token(number, texts[at] if texts else None, css, _says(trajectory, at, ratio, own)))
    return Response(
        shown, len(trajectory["response_tokens"]), float(largest), texts is not None and bool(texts), not all(masks)
    )


def log_ratios(trajectory: dict[str, Any]) -> list[float]:
    """Return log π − log π_ref of each token. Here π is the policy that generated the token."""
    behaviour, reference = trajectory["behaviour_logps"] or [], trajectory["ref_logps"] or []
    return [own - other for own, other in zip(behaviour, reference, strict=False)]


def _says(trajectory: dict[str, Any], at: int, ratio: float | None, own: bool) -> str:
    token = f"token {at + 1} of {trajectory['length']:,}, number {trajectory['response_tokens'][at]}"
    if not own:
        return f"{token}: written by the environment, not learned from"
    if ratio is None:
        return token
    behaviour, reference = trajectory["behaviour_logps"][at], trajectory["ref_logps"][at]
    return (
        f"{token}: log-ratio {written(ratio)} = {written(behaviour)} − ({written(reference)}), policy minus reference"
    )
