"""A generator that samples responses from a transformers model.

Each response is a row of the batch. A prompt is read once for all its responses, and a row that has ended is replaced
by the next request. A response is determined by the weights, the prompt, the seed, the temperature and `top_p`: the
random number of each token comes from (seed, position), never from the other rows. The other rows only change rounding,
so a token can differ where two numbers agree to six digits.
"""

import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError

from tba.errors import Busy, ConfigError, Damaged, Missing
from tba.generation.growing_cache import check_cache
from tba.generation.requests import check_request
from tba.generation.rows_in_flight import Row, RowsInFlight
from tba.generation.version_folder import VersionFolder, copy_weights, describe, is_gone
from tba.models.adapters import Adapter
from tba.models.policy import Policy
from tba.runtime.parking import Parking
from tba.types import Request, Response, Version

# Ended rows are removed, and waiting requests admitted, one eighth of the batch at a time: both copy the whole cache.
_REFILL = 8


class TransformersGenerator:
    """Generates up to `batch_responses` responses in one batch, each of at most `max_response_tokens` tokens."""

    def __init__(
        self,
        *,
        device: str = "auto",
        dtype: str = "float32",
        batch_responses: int = 512,
        max_response_tokens: int = 512,
        trust_remote_code: bool = False,
        adapter: Adapter | None = None,
    ):
        self.adapter = adapter  # set if versions are adapters
        self.device, self.dtype, self.trust_remote_code = device, dtype, trust_remote_code
        self.batch_responses, self.max_response_tokens = batch_responses, max_response_tokens
        self.version: Version | None = None
        self._policy: Policy | None = None
        self._description = b""
        self._ahead: VersionFolder | None = None
        self._waiting: deque[Request] = deque()
        self._flight: RowsInFlight | None = None
        # Each step's time is divided equally among the responses in flight. This is the sum of these shares in seconds.
        self._share = 0.0
        self._parking = Parking(lambda: [self._policy.model] if self._policy else [])

    def adopt(self, folder: Path, version: Version) -> None:
        """Load the weights of a version from a Hugging Face folder.

        If only the weights differ from those of the previous version, they are copied into the loaded model, and
        requests in flight continue with them. Otherwise a new model is loaded; raise Busy if any request is in flight.
        Raise Missing if the folder is removed during the load, and Damaged if it cannot be read. After an error,
        `version` is still the previous version.
        """
        ahead, self._ahead = self._ahead, None
        try:
            read = ahead if ahead and ahead.path == folder else VersionFolder.read(folder)
            if not self._refill(read):
                if self._flight or self._waiting:
                    raise Busy(f"version {version} is another model than the one of the responses in flight")
                self._policy = self._load(folder, read.description)
        except (ConfigError, Damaged, OSError, SafetensorError) as error:
            if is_gone(folder):
                raise Missing(f"version {version} was removed from {folder} while it was read") from error
            if isinstance(error, ConfigError):
                raise
            raise Damaged(f"version {version} in {folder} cannot be read: {error}") from error
        self._description, self.version = read.description, version

    def read_ahead(self, folder: Path) -> None:
        with suppress(OSError, SafetensorError):
            self._ahead = VersionFolder.read(folder)

    def use(self, setting: str, policy: Policy, version: Version) -> None:
        """Generate with a model that is loaded already. Raise ConfigError, naming the setting, if the model's cache
        cannot be used row by row."""
        check_cache(policy.model, setting)
        self._policy, self._description, self.version = policy, b"", version

    def close(self) -> None: ...

    def park(self) -> None:
        """Move the model to main memory. No request may be in flight."""
        self._parking.park()

    def unpark(self) -> None:
        self._parking.unpark()

    def _refill(self, folder: VersionFolder) -> bool:
        """Copy a folder's weights into the loaded model. Return False if the folder holds another model."""
        if self._policy is None or folder.description != self._description:
            return False
        if self.adapter:
            self.adapter.read_into(self._policy.model, folder.path)
            return True
        if copy_weights(self._policy.model, folder.weights):
            return True
        # transformers stores the weights of some models, such as Pythia, under other names than the model's own.
        return copy_weights(self._policy.model, self._load(folder.path, folder.description).model.state_dict())

    def _load(self, folder: Path, description: bytes) -> Policy:
        options = {"dtype": self.dtype, "device": self.device, "trust_remote_code": self.trust_remote_code}
        load = partial(Policy.load_adapted, self.adapter) if self.adapter else Policy.load
        policy = load(folder, **options)
        if describe(folder) != description:  # files were removed while it loaded: transformers does without them
            raise FileNotFoundError(folder)
        check_cache(policy.model, "model.path")
        return policy

    @property
    def policy(self) -> Policy:
        """The model that generates. Raise ConfigError if no version has been adopted."""
        return self._adopted()[0]

    @property
    def tokenizer(self) -> Any:
        return self.policy.tokenizer

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests, those with the longest prompts first: shorter prompts then fit into the columns that the
        cache already has."""
        self._adopted()
        for request in requests:
            check_request(request)
        self._waiting.extend(sorted(requests, key=lambda request: len(request.prompt.tokens), reverse=True))

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, Response]]:
        """Generate one more token of each row, and return the responses that end with this token. Their `logps` are
        those of the model at the request's temperature, before `top_p` removes tokens. The `logps` of greedy responses
        are those at temperature 1."""
        policy, version = self._adopted()
        if not (self._flight or self._waiting):
            return []
        began = time.monotonic()
        flight = self._flight = self._flight or RowsInFlight(policy)
        flight.advance()
        fit = min(len(self._waiting), self.batch_responses - len(flight.rows))
        if fit and fit >= len(flight.rows) // _REFILL:
            flight.admit([self._begun(self._waiting.popleft(), version) for _ in range(fit)])
        taken = [(row, row.take(token, logp, flight.ends)) for row, token, logp in flight.sample()]
        self._share += (time.monotonic() - began) / len(taken)
        flight.drop_ended(at_least=len(flight.rows) // _REFILL)
        if not flight.rows:
            self._flight = None
        return [(row.request, self._response(row)) for row, has_ended in taken if has_ended]

    def _begun(self, request: Request, version: Version) -> Row:
        return Row(request, min(request.limit, self.max_response_tokens), version, began=self._share)

    def _adopted(self) -> tuple[Policy, Version]:
        if self._policy is None or self.version is None:
            raise ConfigError("no version has been adopted yet, so this generator has no weights: call adopt() first")
        return self._policy, self.version

    def _response(self, row: Row) -> Response:
        policy, version = self._adopted()
        return Response(
            tokens=tuple(row.tokens),
            logps=tuple(row.logps),
            text=cast(str, policy.tokenizer.decode(row.tokens, skip_special_tokens=True)),
            finished=row.finished,
            temperature=row.request.temperature,
            top_p=row.request.top_p,
            seed=row.request.seed,
            version_start=row.version_start,
            version_end=version,
            generate_seconds=self._share - row.began,
        )
