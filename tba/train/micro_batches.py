"""Divide a batch into micro-batches of whole groups, and read each micro-batch in one or more pieces.

The loss of a micro-batch needs the log-probabilities of all its tokens, and its gradients need all that the models
computed for them. So a micro-batch has as many groups as fit a budget of tokens, and is read as one piece: its
gradients are computed in one pass. A single group that does not fit the budget is read in several pieces, and twice:

    1  all pieces, without gradients                              l_t of each counted token
    2  the loss of the group, differentiated by the l_t alone     dL/dl_t
    3  each piece again, with gradients                           sum over its t of dL/dl_t dl_t/dw

By the chain rule, the sum of step 3 over all pieces is dL/dw for any loss: the gradients are those of one pass, up to
rounding. A response is never cut, so a response with more tokens than the budget is a piece of its own.

Equal rows have equal log-probabilities, so models read only the first of them, if the caller wants it so. The numbers
are then repeated for the other rows, and the gradients of all equal rows are added up. Some groups have no gradient
whatever the policy is, for example groups with equal rewards under an objective without a KL penalty. They can be left
out before the batch is divided.
"""
# Shapes: B rows, T tokens of a row with padding, R counted tokens of a piece, D hidden.

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tba.batches.batching import Batch, first_equal_rows, groups_in, stretches
from tba.batches.logprobs import logps_at
from tba.batches.packing import Group, groups_of, row_hidden, row_logps, rows
from tba.batches.padded_calls import tokens_per_call
from tba.config import TrainingConfig
from tba.distributed.ranks import Ranks, Share
from tba.objectives.groups import equal_rewards
from tba.objectives.objective import Objective
from tba.types import Metrics


class Packed(NamedTuple):
    """Groups in one row, in which each prompt is followed by its responses."""

    groups: Sequence[Group]
    counted_M: Tensor

    def logps(self, model: Any, *, temperature: float) -> Tensor:
        """Return [R]: the log-probability of each counted token, equal to that of
        `tba.batches.logprobs.token_logps`."""
        return row_logps(
            model,
            self.groups,
            temperature=temperature,
            tokens_per_call=tokens_per_call(model.device),
            counted_M=self.counted_M,
        )

    def hidden(self, backbone: Any) -> Tensor:
        """Return [R, D]: the last hidden state at the position that predicts each counted token."""
        return row_hidden(
            backbone, self.groups, tokens_per_call=tokens_per_call(backbone.device), counted_M=self.counted_M
        )


class Padded(NamedTuple):
    """Rows of prompt and response. Padding is on the right, where causality makes it harmless."""

    tokens_BT: Tensor
    response_mask_BT: Tensor

    def logps(self, model: Any, *, temperature: float) -> Tensor:
        mask_BT = self.response_mask_BT[:, 1:]
        targets_R = self.tokens_BT[:, 1:][mask_BT]
        return logps_at(model, mask_BT, targets_R, temperature=temperature, input_ids=self.tokens_BT[:, :-1])

    def hidden(self, backbone: Any) -> Tensor:
        read = backbone(input_ids=self.tokens_BT[:, :-1], use_cache=False)
        return read.last_hidden_state[self.response_mask_BT[:, 1:]]


Piece = Packed | Padded
Reader = Callable[[Piece], Tensor]
"""Returns [R]: one number for each counted token, through which gradients flow."""


class MicroBatch(NamedTuple):
    first_slot: int
    batch: Batch
    pieces: Sequence[Piece]
    repeats_R: Tensor | None = None  # index among the counted tokens that are read, of each counted token of all rows
    spare: int = 0  # number of extra reads of a piece, so that all ranks read equally many pieces

    def spread(self, value_R: Tensor) -> Tensor:
        """Return [B, T]: the number of each counted token at the position of this token, and 0 elsewhere. `value_R` has
        one number for each counted token that is read."""
        mask_BT = self.batch.response_mask_BT
        if self.repeats_R is not None:
            value_R = value_R.index_select(0, self.repeats_R)  # backward, this adds up in a fixed order
        return value_R.new_zeros(mask_BT.shape).masked_scatter(mask_BT, value_R)

    def spread_all(self, found: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Spread the numbers of each reader, by the reader's name."""
        return {name: self.spread(it) for name, it in found.items()}

    def slots_in(self, share: Share) -> Sequence[int]:
        """Return the slots of these groups in the batch of which a rank has this share."""
        return share.slots[self.first_slot : self.first_slot + self.batch.groups]

    @property
    def at_once(self) -> bool:
        """True if the gradients of the micro-batch are computed in one pass."""
        return len(self.pieces) + self.spare == 1


def groups_to_compute(batch: Batch, objective: Objective, training: TrainingConfig) -> Sequence[int]:
    """Return all groups of a batch or, with `training.computed_rows` at `needed`, those whose gradient may be different
    from 0. At least one group is returned, so that all gradients exist: a step whose gradients are 0 still has momentum
    and weight decay. All groups are returned if the learning rate follows the effective share of the batch, in which
    all of them count."""
    if training.computed_rows == "all" or training.rate_by_effective_share:
        return range(batch.groups)
    first_PK = torch.tensor(first_equal_rows(batch)).unflatten(0, (-1, batch.responses_per_prompt))
    without_P = objective.has_no_gradient(_rewards(batch), (first_PK == first_PK[:, :1]).all(dim=1))
    return [group for group, without in enumerate(without_P.tolist()) if not without] or [0]


def metrics_of_batch(batch: Batch, computed: Sequence[int]) -> Metrics:
    """Return the metric `equal_rewards` of the whole batch, and `computed_tokens`: the number of counted tokens in the
    groups that are computed."""
    tokens_P = batch.response_mask_BT.sum(dim=1).unflatten(0, (-1, batch.responses_per_prompt)).sum(dim=1)
    tokens = sum(tokens_P[group] for group in computed)
    return {"equal_rewards": float(equal_rewards(_rewards(batch))), "computed_tokens": float(tokens)}


def _rewards(batch: Batch) -> Tensor:
    return batch.reward_B.cpu().unflatten(0, (-1, batch.responses_per_prompt))


def micro_batches(
    batch: Batch, *, most_groups: int | None, most_tokens: int | None, packs: bool, equal_once: bool = False
) -> Iterator[MicroBatch]:
    """Divide a batch into parts of whole groups. A part has at most `most_groups` groups, and at most `most_tokens`
    tokens that a model reads; a single group may have more. With `equal_once`, equal rows of a part are read once.

    The mean over all groups is the sum of the parts' means, each multiplied by `part.groups / batch.groups`.
    """
    for chosen in _whole_groups(batch, most_groups, most_tokens, packs, equal_once):
        part = groups_in(batch, chosen)
        chosen_rows, repeats_R = _rows_to_read(part, equal_once)
        pieces = list((_packed if packs else _padded)(part, chosen_rows, most_tokens))
        yield MicroBatch(chosen.start, part, pieces, repeats_R)


def _whole_groups(
    batch: Batch, most_groups: int | None, most_tokens: int | None, packs: bool, equal_once: bool
) -> Iterator[slice]:
    if most_tokens is None:
        return stretches(batch.groups, lambda part: part.stop - part.start, most_groups)
    alone = [groups_in(batch, slice(i, i + 1)) for i in range(batch.groups)]
    to_read = [_rows_to_read(single, equal_once)[0] for single in alone]
    if packs:
        tokens = [
            sum(group.read for group in groups_of(single, chosen)[0])
            for single, chosen in zip(alone, to_read, strict=True)
        ]
        return stretches(batch.groups, lambda part: sum(tokens[part]), most_tokens)
    counts, widths = [len(it) for it in to_read], [_width(it, range(len(it.lengths))) for it in alone]
    return stretches(batch.groups, lambda part: sum(counts[part]) * (max(widths[part]) - 1), most_tokens)


def _rows_to_read(part: Batch, equal_once: bool) -> tuple[Sequence[int], Tensor | None]:
    """Return the rows that a model has to read, and `MicroBatch.repeats_R`, which is None if these are all rows."""
    every = range(len(part.lengths))
    first = first_equal_rows(part) if equal_once else every
    to_read = [row for row in every if first[row] == row]
    if len(to_read) == len(every):
        return to_read, None
    counts = part.response_mask_BT.sum(dim=1).tolist()
    begins, read = dict[int, int](), 0
    for row in to_read:
        begins[row] = read
        read += counts[row]
    repeats = [begins[it] + n for it, count in zip(first, counts, strict=True) for n in range(count)]
    return to_read, torch.tensor(repeats, dtype=torch.long, device=part.tokens_BT.device)


def _packed(part: Batch, chosen: Sequence[int], most_tokens: int | None) -> Iterator[Packed]:
    groups, counted_M = groups_of(part, chosen)
    if most_tokens is None:
        yield Packed(groups, counted_M)
        return
    first = 0
    for row in rows(groups, most_tokens):
        last = first + sum(len(response) for group in row for response in group.responses)
        yield Packed(row, counted_M[first:last])
        first = last


def _padded(part: Batch, chosen: Sequence[int], most_tokens: int | None) -> Iterator[Padded]:
    lacking = max(0, 2 - part.tokens_BT.shape[1])  # models cannot read empty rows
    tokens_BT, mask_BT = (nn.functional.pad(it, (0, lacking)) for it in (part.tokens_BT, part.response_mask_BT))
    for piece in stretches(len(chosen), lambda some: _cells(part, chosen[some]), most_tokens):
        to_read, width = list(chosen[piece]), _width(part, chosen[piece])
        yield Padded(tokens_BT[to_read, :width], mask_BT[to_read, :width])


def _cells(batch: Batch, chosen: Sequence[int]) -> int:
    """Return the number of tokens that a model reads of these rows, padding included. The model reads all columns
    except the last."""
    return len(chosen) * (_width(batch, chosen) - 1)


def _width(batch: Batch, chosen: Sequence[int]) -> int:
    return max(2, *(batch.lengths[row] for row in chosen))


def side_by_side(cut: Iterable[MicroBatch], share: Share, ranks: Ranks) -> tuple[list[MicroBatch], int]:
    """Give this rank as many micro-batches as the rank that has most, and each micro-batch as many pieces. Ranks
    compute each layer together, so a rank with fewer pieces reads extra ones, whose results do not count. Return the
    micro-batches, and how many of them count."""
    parts = list(cut)
    counted = len(parts) if share.counts else 0
    parts += [parts[0]] * (ranks.most([len(parts)])[0] - len(parts))
    most = ranks.most([len(part.pieces) for part in parts])
    return [part._replace(spare=n - len(part.pieces)) for part, n in zip(parts, most, strict=True)], counted


@torch.no_grad()
def read(readers: Mapping[str, Reader], part: MicroBatch) -> dict[str, Tensor]:
    """Return, by the name of the reader, the numbers that each reader computes for all pieces in order."""
    numbers = {name: [reader(piece) for piece in (*part.pieces, *_spare(part))] for name, reader in readers.items()}
    return {name: torch.cat(by_piece[: len(part.pieces)]) for name, by_piece in numbers.items()}


def read_by_all(
    parts: Sequence[MicroBatch], known: Sequence[Mapping[str, Tensor]], share: Share, batch: Batch, ranks: Ranks
) -> tuple[Batch, dict[str, Tensor]]:
    """Return a batch of which each rank has read its share, with the reference log-probabilities that its parts have
    now, and for each reader the numbers of all rows, [B, T]. `known` has the results of `read` for the parts of this
    rank. If the share does not count, neither do they."""
    batch, k = groups_in(batch, slice(0, batch.groups)), batch.responses_per_prompt
    whole: dict[str, Tensor] = {}
    for part, found in zip(parts, known, strict=True):
        rows = [slot * k + j for slot in part.slots_in(share) for j in range(k)]
        for name, it in {**part.spread_all(found), **_references(part.batch)}.items():
            shape = batch.response_mask_BT.shape[: it.ndim]
            to = whole.setdefault(name, it.new_zeros(shape))
            if share.counts:
                to[(rows, slice(it.shape[1])) if it.ndim == 2 else rows] = it
    whole = {name: ranks.add_up(it) for name, it in whole.items()}
    references = {name: whole.pop(name) for name in _references(batch)}
    return replace(batch, **references), whole


def _references(batch: Batch) -> dict[str, Tensor]:
    return {name: it for name in ("ref_logp_B", "ref_logp_BT") if (it := getattr(batch, name)) is not None}


def _spare(part: MicroBatch) -> list[Piece]:
    return [part.pieces[0]] * part.spare


class Reading:
    """The per-token numbers, such as log-probabilities, that each reader computes from a micro-batch. Compute a loss
    from `found`, then call `backward`, which adds the gradient of the loss to the gradients of the weights."""

    def __init__(self, readers: Mapping[str, Reader], part: MicroBatch, known: Mapping[str, Tensor] | None = None):
        """`known` is the result of `read`, if the caller has it already."""
        self.readers, self.part = readers, part
        if part.at_once:
            self.found = {name: reader(part.pieces[0]) for name, reader in readers.items()}
        else:
            known = known or read(readers, part)
            self.found = {name: it.detach().requires_grad_() for name, it in known.items()}

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients of a loss that was computed from `found`, and add them to the gradients of the
        weights."""
        loss.backward()
        if not self.part.at_once:
            for name, reader in self.readers.items():
                self._again(reader, self.found[name].grad)

    def _again(self, reader: Reader, grad: Tensor | None) -> None:
        """Read each piece again, and go backward through it with its part of `grad`. Memory then holds what one model
        has computed for one piece, not for all pieces."""
        if grad is None:
            return  # the loss does not depend on this reader
        first = 0
        for piece in self.part.pieces:
            number_R = reader(piece)
            number_R.backward(grad[first : first + len(number_R)])
            first += len(number_R)
        for piece in _spare(self.part):
            number_R = reader(piece)
            number_R.backward(torch.zeros_like(number_R))
