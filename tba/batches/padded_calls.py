"""Attention of a packed row in several calls. Each takes short sequences of similar length, padded to the longest."""
# Shapes: N tokens of the row, H heads, G heads of keys and values, D size of a head; in a call: C sequences, Q queries
# and K keys of each with padding.

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tba.batches.attention import attention
from tba.batches.batching import buckets
from tba.batches.unpadded_attention import Span


def tokens_per_call(device: torch.device) -> int:
    """Return the number of tokens that attention takes per call. On a CPU, the tokens of a call should stay in its
    cache, and an extra call costs little."""
    return 512 if device.type == "cpu" else 8192


@dataclass
class Call:
    """Sequences that attention processes in one call. Padding reads token 0; the results of padding are written behind
    the end of the row and dropped."""

    queries_CQ: Tensor  # positions in the row
    keys_CK: Tensor  # positions in the row
    into_CQ: Tensor  # positions to which the results are written
    last_CQ: Tensor  # index of the last key that each query sees
    is_square: bool  # queries and keys have the same positions, and a query sees the keys up to its own position
    masks: dict[int, Tensor] = field(default_factory=dict)

    def mask(self, window: int | None) -> Tensor | None:
        """Return [C, 1, Q, K]: whether each query sees each key. A query sees at most `window` keys, the last of which
        `last_CQ` gives. Return None if a causal mask has the same effect."""
        keys = self.keys_CK.shape[1]
        seen = keys if window is None else min(window, keys)
        if self.is_square and seen == keys:
            return None
        if seen not in self.masks:
            away_CQK = self.last_CQ[:, :, None] - torch.arange(keys, device=self.last_CQ.device)
            self.masks[seen] = ((away_CQK >= 0) & (away_CQK < seen))[:, None]
        return self.masks[seen]


def calls_of(spans: Sequence[Span], row: int, tokens_per_call: int, device: torch.device) -> list[Call]:
    """Return the calls for a row of `row` tokens: first those of prompts, then those of responses. A call has at most
    `tokens_per_call` keys with padding, or a single sequence."""
    prompts, responses = ([span for span in spans if bool(span[0]) is follows] for follows in (False, True))
    return [
        _call([some[i] for i in chosen], row, device)
        for some in (prompts, responses)
        for chosen in buckets([len(before) + len(own) for before, own in some], tokens_per_call)
    ]


def _call(spans: Sequence[Span], row: int, device: torch.device) -> Call:
    """Prepare a call of attention for these spans of a row of `row` tokens.

    Without a mask, attention skips half of the work and needs no memory for the mask. So if the sequences make up most
    of their spans, the tokens before them become queries too, and their results are dropped.
    """
    most = max(len(own) for _, own in spans)
    longest = max(len(before) + len(own) for before, own in spans)
    keys = [[*before, *own, *[0] * (longest - len(before) - len(own))] for before, own in spans]
    is_square = 4 * most >= 3 * longest
    if is_square:
        queries, last_CQ = keys, torch.arange(longest)[None]
        into = [[row] * len(it) + [*own] + [row] * (longest - len(it) - len(own)) for it, own in spans]
    else:
        queries = [[*own, *[0] * (most - len(own))] for _, own in spans]
        into = [[*own, *[row] * (most - len(own))] for _, own in spans]
        last_CQ = torch.tensor([len(before) for before, _ in spans])[:, None] + torch.arange(most)
    queries_CQ, keys_CK, into_CQ = (torch.tensor(places, device=device) for places in (queries, keys, into))
    last_CQ = last_CQ.clamp(max=longest - 1).to(device)  # queries that are padding must see a key too
    return Call(queries_CQ, keys_CK, into_CQ, last_CQ, is_square)


def attend_in_calls(
    query_NHD: Tensor, key_NGD: Tensor, value_NGD: Tensor, calls: Sequence[Call], window: int | None, scaling: float
) -> Tensor:
    """Return [N, H, D]: attention of all sequences of a row."""
    tokens, heads, _ = query_NHD.shape
    out_NHD = value_NGD.new_empty(tokens + 1, heads, value_NGD.shape[2])
    for call in calls:
        mask_C1QK = call.mask(window)
        seen_CHQD = attention(
            _vectors_at(query_NHD, call.queries_CQ),
            _vectors_at(key_NGD, call.keys_CK),
            _vectors_at(value_NGD, call.keys_CK),
            mask_C1QK,
            scaling,
        )
        out_NHD.index_copy_(0, call.into_CQ.flatten(), seen_CHQD.transpose(1, 2).flatten(0, 1))
    return out_NHD[:tokens]


def _vectors_at(held_NHD: Tensor, places_CT: Tensor) -> Tensor:
    """Return [C, H, T, D]: the vectors at these positions."""
    return held_NHD.index_select(0, places_CT.flatten()).unflatten(0, places_CT.shape).transpose(1, 2)
