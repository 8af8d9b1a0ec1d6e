"""The tokens of a response as a page shows them: the text of each, read with the tokenizer that is stored with a run's
versions, and the log-ratio of each."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flows.pages.values import shade, written
from storage import layout
from storage.runs.run import Run
from storage.weights.versions import Versions

_LEAST_SCALE = 0.25  # nats: a smaller log-ratio never has the full colour
_MOST_TOKENS = 8000
_FILE = "tokenizer.json"


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


class Tokens:
    """The texts of tokens. The tokenizer is read from storage at the first call, never from a hub or a cache."""

    def __init__(self, run: Run):
        self._run = run
        self._first = threading.Lock()
        self._tokenizer: Any = None

    def texts(self, tokens: Sequence[int]) -> list[str] | None:
        """Return the text of each token; empty where a character goes on in the next token. Return None if the run has
        no readable tokenizer, or if the tokenizer does not know all tokens."""
        with self._first:
            self._tokenizer = self._tokenizer or _read_tokenizer(self._run)
        if self._tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        try:
            stream = DecodeStream(skip_special_tokens=False)
            return [stream.step(self._tokenizer, token) or "" for token in tokens]
        except Exception:  # the library has several errors for unknown tokens
            return None


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


def _read_tokenizer(run: Run) -> Any:
    from tokenizers import Tokenizer

    try:
        for version in reversed(Versions(run).complete()):
            key = f"{layout.version(version)}{_FILE}"
            if run.store.exists(key):
                return Tokenizer.from_str(run.store.read(key).decode())
    except Exception:  # a damaged tokenizer counts as missing; `tba check` names its file
        return None
    return None
