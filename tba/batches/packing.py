"""Log-probabilities of whole groups packed into one row: each prompt is read once for all its responses, and nothing is
padded.

All layers except attention process each token alone. So they can read the tokens of many groups as one row, which holds
each prompt once. Attention is our own function, registered with transformers. Every response attends to its prompt and
to itself, as far as the window of a layer reaches. On a GPU one call does this for the whole row, and on a CPU several
padded calls. A model cannot be packed if its attention cannot be replaced, or if it needs more than this.
"""
# Shapes: N tokens of the row, M tokens of its responses, R counted tokens among these, H heads, D size of a head.

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from tba.batches.batching import Batch, prompt_lengths
from tba.batches.logprobs import logps_at
from tba.batches.padded_calls import Call, attend_in_calls, calls_of, tokens_per_call
from tba.batches.recomputation import again_in
from tba.batches.unpadded_attention import Sequences, Span, attend_at_once, kind_of, sequences_of, why_not
from tba.errors import DataError

ATTENTION = "tba-packed"
_HARMLESS = {"position_ids", "cache_position", "use_cache", "dropout", "is_causal"}  # options that `_attend` may ignore


class CannotPack(Exception):
    """The model's attention needs something that packing does not support."""


class Group(NamedTuple):
    """A prompt and responses to it."""

    prompt: tuple[int, ...]
    responses: Sequence[tuple[int, ...]]

    @property
    def read(self) -> int:
        """Number of tokens that a row holds of this group: all tokens of the prompt, and all but the last token of each
        response."""
        return len(self.prompt) + sum(max(0, len(response) - 1) for response in self.responses)


def rows(groups: Sequence[Group], most: int) -> Iterator[list[Group]]:
    """Yield all responses in order, in rows of at most `most` tokens or of a single response. A group that does not fit
    into a row continues in the next row, which reads the prompt again."""
    row, room = list[Group](), most
    for part in (part for group in groups for part in _parts(group, most)):
        if row and part.read > room:
            yield row
            row, room = [], most
        row.append(part)
        room -= part.read
    if row:
        yield row


def _parts(group: Group, most: int) -> Iterator[Group]:
    part = Group(group.prompt, [])
    for response in group.responses:
        longer = Group(group.prompt, [*part.responses, response])
        if part.responses and longer.read > most:
            yield part
            longer = Group(group.prompt, [response])
        part = longer
    if part.responses:
        yield part


def can_pack(model: nn.Module) -> bool:
    return not why_padded(model)


def why_padded(model: nn.Module) -> str:
    """Return why the model cannot read packed rows. Return an empty string if it can. The model is tried with a short
    packed row. It must accept positions, which count from 0, and its layers may look at other tokens only through plain
    attention."""
    kind = next(it for it in type(model).__mro__ if not it.__module__.startswith("torch.distributed.fsdp"))
    if not isinstance(model, PreTrainedModel) or not kind.__module__.startswith("transformers."):
        return f"a {kind.__name__} is no model of the transformers library"
    if not kind.is_backend_compatible():
        return "its attention cannot be replaced"
    kinds = {type(layer) for layer in DynamicCache(config=model.config).layers}
    if not kinds or kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
        names = ", ".join(sorted(it.__name__ for it in kinds)) or "no layers"
        return f"its cache is not one of plain attention alone: it has {names}"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        return "it does not accept positions (position_ids)"
    if not _counts_from_0(model):
        return "its positions do not begin at 0"
    try:
        with torch.no_grad():
            row_logps(model, [Group((0, 0), [(0, 0)])], temperature=1.0, tokens_per_call=tokens_per_call(model.device))
    except CannotPack as reason:
        return str(reason)
    return ""


@torch.no_grad()
def why_attention_pads(model: PreTrainedModel) -> str:
    """Return why attention takes the sequences of a packed row in padded calls on a GPU. Return an empty string if it
    takes the whole row at once, or if the model is on a CPU, where padded calls that stay in its cache are best. The
    number format matters, so call this where the model computes as in training."""
    if model.device.type == "cpu":
        return ""
    row, _, _ = _row_of(model, [Group((0, 0), [(0, 0)])], tokens_per_call(model.device), None)
    with attending(model, row):
        model(input_ids=row.tokens_1N, position_ids=row.positions_1N, use_cache=False)
    return row.pads_because


@torch.no_grad()
def _counts_from_0(model: PreTrainedModel) -> bool:
    """True if the model predicts the same, up to rounding, whether it gets no positions or the positions 0, 1, 2, ...
    of a row."""
    tokens_1T = torch.zeros(1, 4, dtype=torch.long, device=model.device)
    positions_1T = torch.arange(4, device=model.device)[None]
    without, given = (
        model(input_ids=tokens_1T, use_cache=False, **positions).logits.float()
        for positions in ({}, {"position_ids": positions_1T})
    )
    return bool((given - without).abs().max() <= 0.01 * without.abs().max())


def _windows(model: PreTrainedModel) -> list[int | None]:
    """Return the window of each layer: the number of tokens that it sees, up to and including the current token. None
    means all tokens."""
    return [getattr(layer, "sliding_window", None) for layer in DynamicCache(config=model.config).layers]


@torch.inference_mode()
def packed_logps(
    model: PreTrainedModel, groups: Sequence[Group], *, temperature: float, tokens_per_call: int
) -> list[tuple[float, ...]]:
    """Return the log-probabilities of the tokens of each response, equal to those of
    `tba.batches.logprobs.token_logps`. Raises the errors of `row_logps`."""
    logp_R = row_logps(model, groups, temperature=temperature, tokens_per_call=tokens_per_call)
    logps = iter(logp_R.tolist())
    return [tuple(next(logps) for _ in response) for group in groups for response in group.responses]


def groups_of(batch: Batch, chosen: Sequence[int] | None = None) -> tuple[list[Group], Tensor]:
    """Return the rows of a batch as groups, in order: consecutive rows with the same prompt are one group. Also return
    a flat boolean mask with one entry for each token of all responses in order. The mask is true where the token counts
    in the loss. With `chosen`, only the rows with these indices are returned."""
    parts, counted = list[tuple[tuple[int, ...], tuple[int, ...]]](), list[bool]()
    shared_B = prompt_lengths(batch).repeat_interleave(batch.responses_per_prompt).tolist()
    rows = list(zip(batch.tokens_BT.tolist(), batch.response_mask_BT.tolist(), shared_B, batch.lengths, strict=True))
    for tokens, mask, shared, length in rows if chosen is None else [rows[row] for row in chosen]:
        parts.append((tuple(tokens[:shared]), tuple(tokens[shared:length])))
        counted += mask[shared:length]
    groups = [Group(prompt, [rest for _, rest in them]) for prompt, them in groupby(parts, key=itemgetter(0))]
    return groups, torch.tensor(counted, dtype=torch.bool, device=batch.tokens_BT.device)


def row_logps(
    model: PreTrainedModel,
    groups: Sequence[Group],
    *,
    temperature: float,
    tokens_per_call: int,
    counted_M: Tensor | None = None,
) -> Tensor:
    """Return [R]: the log-probabilities of the response tokens that `counted_M` marks, or of all response tokens if
    `counted_M` is None, one response after the other. Raise CannotPack if the model turns out to need more from
    attention. Attention takes several short sequences per call, padded to at most `tokens_per_call` tokens."""
    row, predicts_R, targets_R = _row_of(model, groups, tokens_per_call, counted_M)
    with attending(model, row):
        places = (torch.zeros_like(predicts_R), predicts_R)
        logp_R = logps_at(
            model, places, targets_R, temperature=temperature, input_ids=row.tokens_1N, position_ids=row.positions_1N
        )
    row.check(model)
    return logp_R


def row_hidden(
    backbone: PreTrainedModel, groups: Sequence[Group], *, tokens_per_call: int, counted_M: Tensor | None = None
) -> Tensor:
    """Return [R, D]: the last hidden state at the position that predicts each counted token. `backbone` is a model
    without output layer. Otherwise this works like `row_logps`."""
    row, predicts_R, _ = _row_of(backbone, groups, tokens_per_call, counted_M)
    with attending(backbone, row):
        read = backbone(input_ids=row.tokens_1N, position_ids=row.positions_1N, use_cache=False)
    row.check(backbone)
    return read.last_hidden_state[0, predicts_R]


def _row_of(
    model: PreTrainedModel, groups: Sequence[Group], tokens_per_call: int, counted_M: Tensor | None
) -> "tuple[Row, Tensor, Tensor]":
    """Return the row, the positions that predict the counted tokens, and the counted tokens."""
    row = Row.of(groups, tokens_per_call, model.device)
    if counted_M is None:
        return row, row.predicts_M, row.targets_M
    return row, row.predicts_M[counted_M], row.targets_M[counted_M]


@dataclass
class Row:
    """The tokens that a model reads at once, and the calls of attention for these tokens."""

    tokens_1N: Tensor
    positions_1N: Tensor
    predicts_M: Tensor  # index in the row at which each response token is predicted, response after response
    targets_M: Tensor  # the response tokens themselves
    spans: list[Span]  # prompts and responses in the order of the row; together they have each token once
    tokens_per_call: int
    attended: dict[nn.Module, int | None] = field(default_factory=dict)  # layers that used `_attend`, with windows
    pads_because: str = ""  # why attention read the row in padded calls; empty if it read the row at once

    @classmethod
    def of(cls, groups: Sequence[Group], tokens_per_call: int, device: torch.device) -> "Row":
        """Make a row in which each prompt is followed by its responses. The last token of a response is left out,
        because it is predicted but never read."""
        tokens, positions, predicts, targets = [list[int]() for _ in range(4)]
        spans = list[Span]()
        for prompt, answers in groups:
            if not prompt:
                raise DataError("a prompt needs at least 1 token, got 0")
            read = range(len(tokens), len(tokens) + len(prompt))
            tokens += prompt
            positions += range(len(prompt))
            spans.append((range(0), read))
            for answer in filter(None, answers):
                own = range(len(tokens), len(tokens) + len(answer) - 1)
                tokens += answer[:-1]
                positions += range(len(prompt), len(prompt) + len(own))
                predicts += [read[-1], *own]
                targets += answer
                if own:
                    spans.append((read, own))
        return cls(
            torch.tensor([tokens], device=device),
            torch.tensor([positions], device=device),
            torch.tensor(predicts, dtype=torch.long, device=device),  # the list may be empty
            torch.tensor(targets, dtype=torch.long, device=device),
            spans,
            tokens_per_call,
        )

    @cached_property
    def calls(self) -> list[Call]:
        """The padded calls in which attention reads the row."""
        return calls_of(self.spans, self.tokens_1N.shape[1], self.tokens_per_call, self.tokens_1N.device)

    @cached_property
    def sequences(self) -> Sequences:
        """The row as a kernel takes it that reads the row at once."""
        return sequences_of(self.spans, self.tokens_1N.device)

    def check(self, model: PreTrainedModel) -> None:
        """Raise CannotPack unless every layer has read the row with `_attend` and its own window."""
        windows = _windows(model)
        if len(self.attended) != len(windows):
            raise CannotPack(f"only {len(self.attended)} of {len(windows)} layers use the attention they are given")
        if list(self.attended.values()) != windows:
            raise CannotPack("it does not pass the window of each layer to attention")


_row: ContextVar[Row] = ContextVar("row")


@contextmanager
def attending(model: PreTrainedModel, row: Row) -> Iterator[None]:
    """In the `with` block, the model uses our attention, which processes this row. Afterwards the model uses its own
    attention again."""
    before, token = model.config._attn_implementation or "eager", _row.set(row)
    try:
        model.set_attn_implementation(ATTENTION)
        with again_in(lambda: attending(model, row)):
            yield
    finally:
        model.set_attn_implementation(before)
        _row.reset(token)


def _attend(
    module: nn.Module,
    query_1HND: Tensor,
    key_1HND: Tensor,
    value_1HND: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Compute attention over the row of the current `attending` block. The arguments are those that transformers
    passes. Return [1, N, H, D]."""
    row = _row.get()
    row.attended[module] = sliding_window
    others = {name for name, value in options.items() if not (value is None or value is False or name in _HARMLESS)}
    if others or attention_mask is not None:
        raise CannotPack(f"its attention needs {', '.join(sorted(others)) or 'a mask of its own'}")
    query_NHD, key_NHD, value_NHD = (it[0].transpose(0, 1) for it in (query_1HND, key_1HND, value_1HND))
    scale = query_NHD.shape[2] ** -0.5 if scaling is None else scaling
    why = why_not(kind_of(query_NHD, key_NHD, value_NHD, sliding_window))
    row.pads_because = row.pads_because or why
    if why:
        out_NHD = attend_in_calls(query_NHD, key_NHD, value_NHD, row.calls, sliding_window, scale)
    else:
        out_NHD = attend_at_once(query_NHD, key_NHD, value_NHD, row.sequences, sliding_window, scale)
    return out_NHD[None], None


AttentionInterface.register(ATTENTION, _attend)
