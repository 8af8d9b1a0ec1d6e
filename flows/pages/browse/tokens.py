"""The tokenizer that is stored with a run's versions: it turns the tokens of a response into texts."""

import threading
from collections.abc import Sequence
from typing import Any

from storage import layout
from storage.runs.run import Run
from storage.weights.versions import Versions

_FILE = "tokenizer.json"


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
            self._tokenizer = self._tokenizer or _read(self._run)
        if self._tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        try:
            stream = DecodeStream(skip_special_tokens=False)
            return [stream.step(self._tokenizer, token) or "" for token in tokens]
        except Exception:  # the library has several errors for unknown tokens
            return None


def _read(run: Run) -> Any:
    from tokenizers import Tokenizer

    try:
        for version in reversed(Versions(run).complete()):
            key = f"{layout.version(version)}{_FILE}"
            if run.store.exists(key):
                return Tokenizer.from_str(run.store.read(key).decode())
    except Exception:  # a damaged tokenizer counts as missing; `tba check` names its file
        return None
    return None
