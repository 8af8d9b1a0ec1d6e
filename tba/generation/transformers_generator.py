"""Responses from a transformers model: batched, each prompt read once, places refilled as responses end.

A response is a row of the batch. What a seed yields is a function of weights, prompt, seed and temperature alone: the
random number of each token comes from (seed, position), never from what the row stands beside. Only rounding depends
on that, so a token can differ where two numbers agree to six digits.
"""
# Shapes: B rows, P prompts, T columns (tokens of prompt and response with padding on the left), V vocabulary.

import hashlib
import inspect
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache, DynamicLayer

from tba.batches.logprobs import chosen_logps
from tba.errors import Busy, ConfigError, Damaged, Missing
from tba.generation.requests import check_request
from tba.models.adapters import CONFIG, Adapter
from tba.models.policy import Policy
from tba.models.pretrained import end_tokens
from tba.types import Request, Response, Version

_DESCRIPTION = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", CONFIG)
_REFILL = 8  # ended rows leave, and waiting ones come in, an eighth of the batch at a time: both copy the whole cache


class TransformersGenerator:
    """Generates at most `batch_responses` responses side by side, each of at most `max_response_tokens` tokens."""

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
        self.adapter = adapter  # where versions are adapters
        self.device, self.dtype, self.trust_remote_code = device, dtype, trust_remote_code
        self.batch_responses, self.max_response_tokens = batch_responses, max_response_tokens
        self.version: Version | None = None
        self._policy: Policy | None = None
        self._description = b""
        self._ahead: _Folder | None = None
        self._waiting: deque[Request] = deque()
        self._flight: _Flight | None = None
        self._share = 0.0  # seconds that a response has had which was in flight all along: each has an equal part

    def adopt(self, folder: Path, version: Version) -> None:
        """Load the weights of a version from a Hugging Face folder; where nothing else differs from the version before,
        into the model that is there, with which what is in flight goes on; else Busy if anything is. Missing if the
        folder is removed meanwhile, Damaged if it cannot be read. The weights before it then stay."""
        ahead, self._ahead = self._ahead, None
        try:
            read = ahead if ahead and ahead.path == folder else _Folder.read(folder)
            if not self._refill(read):
                if self._flight or self._waiting:
                    raise Busy(f"version {version} is another model than that of the responses in flight")
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
            self._ahead = _Folder.read(folder)

    def use(self, setting: str, policy: Policy, version: Version) -> None:
        """Generate with a model that is loaded already; ConfigError, naming the setting, if that is not possible."""
        _check_cache(policy.model, setting)
        self._policy, self._description, self.version = policy, b"", version

    def close(self) -> None: ...

    def _refill(self, folder: "_Folder") -> bool:
        """Copy a folder's weights into the model that is there. False if it is another model."""
        if self._policy is None or folder.description != self._description:
            return False
        if self.adapter:
            self.adapter.read_into(self._policy.model, folder.path)
            return True
        if _refill(self._policy.model, folder.weights):
            return True  # else transformers may store them under other names than the model has, as of Pythia
        return _refill(self._policy.model, self._load(folder.path, folder.description).model.state_dict())

    def _load(self, folder: Path, description: bytes) -> Policy:
        options = {"dtype": self.dtype, "device": self.device, "trust_remote_code": self.trust_remote_code}
        load = partial(Policy.load_adapted, self.adapter) if self.adapter else Policy.load
        policy = load(folder, **options)
        if describe(folder) != description:  # transformers makes do with what is left
            raise FileNotFoundError(folder)
        _check_cache(policy.model, "model.path")
        return policy

    @property
    def tokenizer(self) -> Any:
        return self._adopted()[0].tokenizer

    def submit(self, requests: Sequence[Request]) -> None:
        """Long prompts come first: later ones then fit in the columns that are there."""
        self._adopted()
        for request in requests:
            check_request(request)
        self._waiting.extend(sorted(requests, key=lambda request: len(request.prompt.tokens), reverse=True))

    @torch.inference_mode()
    def step(self) -> list[tuple[Request, Response]]:
        """One more token of each row, and the responses that end with it. Their `logps` are those of the model at the
        temperature, before `top_p` cuts it; of greedy ones the model's own, at temperature 1."""
        policy, version = self._adopted()
        if not (self._flight or self._waiting):
            return []
        began = time.monotonic()
        flight = self._flight = self._flight or _Flight(policy)
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

    def _begun(self, request: Request, version: Version) -> "_Row":
        return _Row(request, min(request.limit, self.max_response_tokens), version, began=self._share)

    def _adopted(self) -> tuple[Policy, Version]:
        if self._policy is None or self.version is None:
            raise ConfigError("a generator has no weights before it has adopted a version")
        return self._policy, self.version

    def _response(self, row: "_Row") -> Response:
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


@dataclass(eq=False, slots=True)
class _Row:
    """One response in the making."""

    request: Request
    limit: int
    version_start: Version
    began: float
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finished: bool = False
    ended: bool = False

    def take(self, token: int, logp: float, ends: frozenset[int]) -> bool:
        """Whether it has ended."""
        self.tokens.append(token)
        self.logps.append(logp)
        self.finished = token in ends
        self.ended = self.finished or len(self.tokens) >= self.limit
        return self.ended


class _Flight:
    """The rows that are being generated. All end in the same column, whatever their lengths, and the cache has one
    column per token; `start` is the column of each row's first token."""

    def __init__(self, policy: Policy):
        self.model = model = policy.model
        self.ends = end_tokens(model.generation_config, policy.tokenizer)
        self.rows: list[_Row] = []
        self.cache = _new_cache()
        self.start_B = torch.empty(0, dtype=torch.long, device=model.device)
        self.logits_BV = torch.empty(0)
        accepted = inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._takes_positions = "position_ids" in accepted

    def admit(self, rows: Sequence[_Row]) -> None:
        """Read each prompt once, repeat what the cache holds of it, and put the new rows beside the old ones."""
        prompts = list(dict.fromkeys(row.request.prompt.tokens for row in rows))
        place = {prompt: i for i, prompt in enumerate(prompts)}
        width = max(len(prompt) for prompt in prompts)
        tokens_PT = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self.model.device)
        start_P = torch.tensor([width - len(p) for p in prompts], device=self.model.device)
        cache = _new_cache()
        logits_PV = self._forward(tokens_PT, start_P, cache)
        copies_B = torch.tensor([place[row.request.prompt.tokens] for row in rows], device=self.model.device)
        for layer in _layers(cache):
            layer.select(copies_B)
        start_B, logits_BV = start_P[copies_B], logits_PV[copies_B]
        if self.rows:
            before = _layers(self.cache)[0].length
            for layer, new in zip(_layers(self.cache), _layers(cache), strict=True):
                layer.join(new)
            start_B = torch.cat([self.start_B + max(0, width - before), start_B + max(0, before - width)])
            logits_BV = torch.cat([self.logits_BV, logits_BV])
        else:
            self.cache = cache
        self.rows, self.start_B, self.logits_BV = self.rows + list(rows), start_B, logits_BV

    def sample(self) -> Iterator[tuple[_Row, int, float]]:
        """The next token of each row that has not ended."""
        seeds = np.array([row.request.seed for row in self.rows], dtype=np.uint64)
        positions = np.array([len(row.tokens) for row in self.rows], dtype=np.uint64)
        uniforms_B = torch.from_numpy(uniforms(seeds, positions)).to(self.logits_BV.device)
        self.tokens_B = torch.empty(len(self.rows), dtype=torch.long, device=self.logits_BV.device)
        logps_B = torch.empty(len(self.rows), dtype=torch.float32, device=self.logits_BV.device)
        ways = [(row.request.temperature, row.request.top_p) for row in self.rows]
        for temperature, top_p in dict.fromkeys(ways):
            same_B = torch.tensor([way == (temperature, top_p) for way in ways], device=self.logits_BV.device)
            logits_BV = self.logits_BV if same_B.all() else self.logits_BV[same_B]
            tokens_B = choose(logits_BV, uniforms_B[same_B], temperature=temperature, top_p=top_p)
            self.tokens_B[same_B] = tokens_B
            logps_B[same_B] = chosen_logps(logits_BV, tokens_B, temperature=temperature or 1.0).float()
        for row in zip(self.rows, self.tokens_B.tolist(), logps_B.tolist(), strict=True):
            if not row[0].ended:
                yield row

    def drop_ended(self, *, at_least: int) -> None:
        """Rows that have ended leave once there are enough of them; until then they are carried along unread."""
        going = [i for i, row in enumerate(self.rows) if not row.ended]
        if going and len(self.rows) - len(going) < max(1, at_least):
            return
        going_B = torch.tensor(going, dtype=torch.long, device=self.model.device)
        self.rows = [self.rows[i] for i in going]
        self.tokens_B, self.start_B = self.tokens_B[going_B], self.start_B[going_B]
        spare = int(self.start_B.min()) if going else 0
        self.start_B -= spare
        for layer in _layers(self.cache):
            layer.select(going_B, first=spare)

    def advance(self) -> None:
        if self.rows:
            self.logits_BV = self._forward(self.tokens_B[:, None], self.start_B, self.cache)

    def _forward(self, tokens_BT: Tensor, start_B: Tensor, cache: Cache) -> Tensor:
        """[B, V] logits after the last of some more tokens of each row."""
        before = _layers(cache)[0].length if cache.layers else 0
        columns_T = torch.arange(before + tokens_BT.shape[1], device=tokens_BT.device)
        mask_BT = columns_T >= start_B[:, None]
        options = dict(self._options)
        if self._takes_positions:
            options["position_ids"] = (columns_T[before:] - start_B[:, None]).clamp(min=0)
        out = self.model(tokens_BT, attention_mask=mask_BT, past_key_values=cache, use_cache=True, **options)
        return out.logits[:, -1]


class _Layer(DynamicLayer):
    """Keys and values of one layer, [B, heads, T, head size], with room to grow: a step writes one column in place
    where the plain cache copies all that came before."""

    length = 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        first, self.length = self.length, self.length + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self._keys, self._values = key_states, value_states
        else:
            if self.length > self._keys.shape[-2]:
                self._keys, self._values = self._with_room(self._keys), self._with_room(self._values)
            self._keys[:, :, first : self.length] = key_states
            self._values[:, :, first : self.length] = value_states
        return self._show()

    def select(self, rows_B: Tensor, *, first: int = 0) -> None:
        """Keep these rows (one may be named twice), from column `first` on."""
        self._keys = self._keys[:, :, first : self.length].index_select(0, rows_B)
        self._values = self._values[:, :, first : self.length].index_select(0, rows_B)
        self.length -= first
        self._show()

    def join(self, other: "_Layer") -> None:
        """Add the rows of another one, so that all end in the same column."""
        self._keys = _stack(self._keys[:, :, : self.length], other._keys)
        self._values = _stack(self._values[:, :, : self.length], other._values)
        self.length = self._keys.shape[2]
        self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = self._keys[:, :, : self.length], self._values[:, :, : self.length]
        return self.keys, self.values

    def _with_room(self, held: Tensor) -> Tensor:
        rows, heads, columns, size = held.shape
        larger = held.new_zeros((rows, heads, max(self.length, columns + columns // 2 + 8), size))
        larger[:, :, :columns] = held
        return larger


def _stack(upper: Tensor, lower: Tensor) -> Tensor:
    rows, columns = len(upper) + len(lower), max(upper.shape[2], lower.shape[2])
    both = upper.new_zeros((rows, upper.shape[1], columns, upper.shape[3]))
    both[: len(upper), :, columns - upper.shape[2] :] = upper
    both[len(upper) :, :, columns - lower.shape[2] :] = lower
    return both


def _new_cache() -> Cache:
    return Cache(layer_class_to_replicate=_Layer)


def _layers(cache: Cache) -> list[_Layer]:
    return cast(list[_Layer], cache.layers)


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The number in (0, 1) that decides the token at each (seed, position): two rounds of splitmix64."""
    golden = np.uint64(0x9E3779B97F4A7C15)
    mixed = _mix(_mix(seeds.astype(np.uint64)) + (positions.astype(np.uint64) + np.uint64(1)) * golden)
    return ((mixed >> np.uint64(11)).astype(np.float64) + 0.5) / 2.0**53


def _mix(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def choose(logits_BV: Tensor, uniforms_B: Tensor, *, temperature: float, top_p: float) -> Tensor:
    """[B] tokens: where the cumulative probabilities, in order of token, pass each uniform; at temperature 0 the most
    likely one. `top_p` keeps the fewest most likely tokens that reach it."""
    if temperature == 0:
        return logits_BV.argmax(dim=1)
    rows = max(1, 2**20 // logits_BV.shape[1])  # a large vocabulary in double precision, a few rows at a time
    return torch.cat(
        [
            _invert(torch.softmax(logits.double() / temperature, dim=1), uniform, top_p)
            for logits, uniform in zip(logits_BV.split(rows), uniforms_B.split(rows), strict=True)
        ]
    )


def _invert(probability_BV: Tensor, uniforms_B: Tensor, top_p: float) -> Tensor:
    if top_p < 1:
        sorted_BV, order_BV = probability_BV.sort(dim=1, descending=True, stable=True)
        sorted_BV[sorted_BV.cumsum(dim=1) - sorted_BV >= top_p] = 0
        probability_BV = torch.zeros_like(probability_BV).scatter(1, order_BV, sorted_BV)
    cumulative_BV = probability_BV.cumsum(dim=1)
    found_B1 = torch.searchsorted(cumulative_BV, uniforms_B[:, None] * cumulative_BV[:, -1:], right=True)
    return found_B1.squeeze(1).clamp(max=probability_BV.shape[1] - 1)


def _check_cache(model: PreTrainedModel, setting: str) -> None:
    """Rows are moved about in the cache, which needs one entry per token in every layer."""
    kept = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    if foreign := kept - {"DynamicLayer", "DynamicSlidingWindowLayer"}:
        raise ConfigError(f"{setting}: cannot generate with {model.config.model_type}: it keeps {', '.join(foreign)}")


def describe(folder: Path) -> bytes:
    """A digest of all that a folder says beside its weights."""
    digest = hashlib.sha256()
    for name in _DESCRIPTION:
        path = folder / name
        digest.update(path.read_bytes() if path.exists() else b"")
        digest.update(b"\0")
    return digest.digest()


def is_gone(folder: Path) -> bool:
    """The description of a model, or of an adapter, is the first file to go, and at last the folder."""
    return not any((folder / name).exists() for name in ("config.json", CONFIG))


@dataclass(frozen=True)
class _Folder:
    """What a version is made of. Its weights are mapped, not read: they take no memory of their own, and stay when the
    folder is removed."""

    path: Path
    description: bytes
    weights: dict[str, Tensor]

    @staticmethod
    def read(path: Path) -> "_Folder":
        files = sorted(path.glob("*.safetensors"))
        return _Folder(path, describe(path), {name: it for file in files for name, it in load_file(file).items()})


def _refill(model: PreTrainedModel, found: Mapping[str, Tensor]) -> bool:
    """Copy weights into a model. False if they are not the model's, by name."""
    tied, held = set(getattr(model, "all_tied_weights_keys", None) or ()), model.state_dict()
    if set(held) - tied != set(found) - tied or any(held[name].shape != found[name].shape for name in found):
        return False
    for name, tensor in found.items():
        held[name].copy_(tensor)
    return True
