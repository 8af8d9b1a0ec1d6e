"""The batch that a transformers model generates: each row is a response in flight, and each step adds one token to
every row."""
# Shapes: B rows, P prompts, T columns (tokens of prompt and response with padding on the left), V vocabulary.

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import Cache

from tba.batches.logprobs import chosen_logps
from tba.generation.growing_cache import layers_of, new_cache
from tba.generation.token_choice import choose, uniforms
from tba.models.policy import Policy
from tba.models.pretrained import end_tokens
from tba.types import Request, Version


@dataclass(eq=False, slots=True)
class Row:
    """One response that is being generated."""

    request: Request
    limit: int
    version_start: Version
    began: float
    tokens: list[int] = field(default_factory=list)
    logps: list[float] = field(default_factory=list)
    finished: bool = False
    ended: bool = False

    def take(self, token: int, logp: float, ends: frozenset[int]) -> bool:
        """Add a token, and return whether the response has ended."""
        self.tokens.append(token)
        self.logps.append(logp)
        self.finished = token in ends
        self.ended = self.finished or len(self.tokens) >= self.limit
        return self.ended


class RowsInFlight:
    """The batch of responses in flight and its cache. The cache has one column per token. Rows are padded on the left,
    so that all of them end in the same column; `start_B` holds the column of each row's first token."""

    def __init__(self, policy: Policy):
        self.model = model = policy.model
        self.ends = end_tokens(model.generation_config, policy.tokenizer)
        self.rows: list[Row] = []
        self.cache = new_cache()
        self.start_B = torch.empty(0, dtype=torch.long, device=model.device)
        self.logits_BV = torch.empty(0)
        accepted = inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        self._takes_positions = "position_ids" in accepted

    def admit(self, rows: Sequence[Row]) -> None:
        """Add new rows to the batch. Each distinct prompt is read once, and its keys and values are copied to all rows
        that begin with it."""
        prompts = list(dict.fromkeys(row.request.prompt.tokens for row in rows))
        place = {prompt: i for i, prompt in enumerate(prompts)}
        width = max(len(prompt) for prompt in prompts)
        tokens_PT = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=self.model.device)
        start_P = torch.tensor([width - len(p) for p in prompts], device=self.model.device)
        cache = new_cache()
        logits_PV = self._forward(tokens_PT, start_P, cache)
        copies_B = torch.tensor([place[row.request.prompt.tokens] for row in rows], device=self.model.device)
        for layer in layers_of(cache):
            layer.select(copies_B)
        start_B, logits_BV = start_P[copies_B], logits_PV[copies_B]
        if self.rows:
            before = layers_of(self.cache)[0].length
            for layer, new in zip(layers_of(self.cache), layers_of(cache), strict=True):
                layer.join(new)
            start_B = torch.cat([self.start_B + max(0, width - before), start_B + max(0, before - width)])
            logits_BV = torch.cat([self.logits_BV, logits_BV])
        else:
            self.cache = cache
        self.rows, self.start_B, self.logits_BV = self.rows + list(rows), start_B, logits_BV

    def sample(self) -> Iterator[tuple[Row, int, float]]:
        """Yield the next token of each row that has not ended, with its log-probability."""
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
        """Remove the rows that have ended, if there are at least `at_least` of them or no other rows. Otherwise the
        ended rows stay in the batch, and their further tokens are ignored."""
        going = [i for i, row in enumerate(self.rows) if not row.ended]
        if going and len(self.rows) - len(going) < max(1, at_least):
            return
        going_B = torch.tensor(going, dtype=torch.long, device=self.model.device)
        self.rows = [self.rows[i] for i in going]
        self.tokens_B, self.start_B = self.tokens_B[going_B], self.start_B[going_B]
        spare = int(self.start_B.min()) if going else 0
        self.start_B -= spare
        for layer in layers_of(self.cache):
            layer.select(going_B, first=spare)

    def advance(self) -> None:
        """Let the model read the newest token of each row."""
        if self.rows:
            self.logits_BV = self._forward(self.tokens_B[:, None], self.start_B, self.cache)

    def _forward(self, tokens_BT: Tensor, start_B: Tensor, cache: Cache) -> Tensor:
        """Let the model read further tokens of each row, and return the [B, V] logits after the last token."""
        before = layers_of(cache)[0].length if cache.layers else 0
        columns_T = torch.arange(before + tokens_BT.shape[1], device=tokens_BT.device)
        mask_BT = columns_T >= start_B[:, None]
        options = dict(self._options)
        if self._takes_positions:
            options["position_ids"] = (columns_T[before:] - start_B[:, None]).clamp(min=0)
        out = self.model(tokens_BT, attention_mask=mask_BT, past_key_values=cache, use_cache=True, **options)
        return out.logits[:, -1]
