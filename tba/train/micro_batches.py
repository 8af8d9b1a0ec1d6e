"""How models read a batch: in micro-batches of whole groups, and each of those in pieces.

The loss of a micro-batch needs all of its log-probabilities, and their gradients all that its models computed on the
way. So a micro-batch is what fits a budget of tokens, and one piece: its gradients are taken in one pass. A group that
does not fit is read in several pieces, and twice:

    1  all pieces, without gradients                              l_t, of each token that counts
    2  the loss of the group, differentiated by these alone       dL/dl_t
    3  each piece again, with gradients                           sum over its t of dL/dl_t dl_t/dw

By the chain rule the third, summed over the pieces, is dL/dw, whatever the loss is: gradients are those of one pass but
for rounding. A response is never cut, so that one of more tokens than the budget is a piece.
"""
# Shapes: B rows, T tokens of a row with padding, R those of a piece's responses that count, D hidden.

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tba.batches.batching import Batch, groups_in, stretches
from tba.batches.logprobs import logps_at
from tba.batches.packing import Group, groups_of, row_hidden, row_logps, rows, tokens_per_call
from tba.distributed.ranks import Ranks, Share


class Packed(NamedTuple):
    """Responses in one row, behind their prompts."""

    groups: Sequence[Group]
    counted_M: Tensor

    def logps(self, model: Any, *, temperature: float) -> Tensor:
        """[R] as `tba.batches.logprobs.token_logps` has them."""
        return row_logps(
            model,
            self.groups,
            temperature=temperature,
            tokens_per_call=tokens_per_call(model.device),
            counted_M=self.counted_M,
        )

    def hidden(self, backbone: Any) -> Tensor:
        """[R, D] the last hidden state where each token that counts is predicted."""
        return row_hidden(
            backbone, self.groups, tokens_per_call=tokens_per_call(backbone.device), counted_M=self.counted_M
        )


class Padded(NamedTuple):
    """Rows of prompt and response; padding stands on the right, where causality makes it harmless."""

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
"""[R] a number of each token that counts, differentiable."""


class MicroBatch(NamedTuple):
    first_slot: int
    batch: Batch
    pieces: Sequence[Piece]
    spare: int = 0  # pieces that are read in vain, as other ranks read so many more at the same time

    @property
    def at_once(self) -> bool:
        """Whether its gradients are taken in one pass."""
        return len(self.pieces) + self.spare == 1


def micro_batches(
    batch: Batch, *, most_groups: int | None, most_tokens: int | None, packs: bool
) -> Iterator[MicroBatch]:
    """The batch in parts of whole groups, of which a model reads at most so many groups, and at most so many tokens or
    one group.

    The mean over all groups is the parts' means, each weighted by `part.groups / batch.groups`.
    """
    for chosen in _whole_groups(batch, most_groups, most_tokens, packs):
        part = groups_in(batch, chosen)
        yield MicroBatch(chosen.start, part, list((_packed if packs else _padded)(part, most_tokens)))


def _whole_groups(batch: Batch, most_groups: int | None, most_tokens: int | None, packs: bool) -> Iterator[slice]:
    if most_tokens is None:
        return stretches(batch.groups, lambda them: them.stop - them.start, most_groups)
    if not packs:
        k = batch.responses_per_prompt
        return stretches(batch.groups, lambda them: _cells(batch, slice(k * them.start, k * them.stop)), most_tokens)
    alone = (groups_in(batch, slice(i, i + 1)) for i in range(batch.groups))
    reads = [sum(group.read for group in groups_of(it)[0]) for it in alone]
    return stretches(batch.groups, lambda them: sum(reads[them]), most_tokens)


def _packed(part: Batch, most_tokens: int | None) -> Iterator[Packed]:
    groups, counted_M = groups_of(part)
    if most_tokens is None:
        yield Packed(groups, counted_M)
        return
    first = 0
    for row in rows(groups, most_tokens):
        last = first + sum(len(response) for group in row for response in group.responses)
        yield Packed(row, counted_M[first:last])
        first = last


def _padded(part: Batch, most_tokens: int | None) -> Iterator[Padded]:
    lacking = max(0, 2 - part.tokens_BT.shape[1])  # models do not read nothing
    tokens_BT, mask_BT = (nn.functional.pad(it, (0, lacking)) for it in (part.tokens_BT, part.response_mask_BT))
    for chosen in stretches(len(part.lengths), lambda them: _cells(part, them), most_tokens):
        width = _width(part, chosen)
        yield Padded(tokens_BT[chosen, :width], mask_BT[chosen, :width])


def _cells(batch: Batch, chosen: slice) -> int:
    """Tokens of these rows with padding, as a model reads them: without the last."""
    return len(batch.lengths[chosen]) * (_width(batch, chosen) - 1)


def _width(batch: Batch, chosen: slice) -> int:
    return max(2, *batch.lengths[chosen])


def side_by_side(cut: Iterable[MicroBatch], share: Share, ranks: Ranks) -> tuple[list[MicroBatch], int]:
    """As many micro-batches as any rank has, and each of as many pieces as any other's: layer by layer ranks compute
    together, so what one lacks it reads in vain. With how many of them count."""
    parts = list(cut)
    counted = len(parts) if share.counts else 0
    parts += [parts[0]] * (ranks.most([len(parts)])[0] - len(parts))
    most = ranks.most([len(part.pieces) for part in parts])
    return [part._replace(spare=n - len(part.pieces)) for part, n in zip(parts, most, strict=True)], counted


@torch.no_grad()
def read(readers: Mapping[str, Reader], part: MicroBatch) -> dict[str, Tensor]:
    """Under each reader's name its numbers of all pieces, one after the other."""
    found = {name: [reader(piece) for piece in (*part.pieces, *_spare(part))] for name, reader in readers.items()}
    return {name: torch.cat(them[: len(part.pieces)]) for name, them in found.items()}


def _spare(part: MicroBatch) -> list[Piece]:
    return [part.pieces[0]] * part.spare


class Reading:
    """What readers make of a micro-batch, for a loss that is to be differentiated."""

    def __init__(self, readers: Mapping[str, Reader], part: MicroBatch, known: Mapping[str, Tensor] | None = None):
        """`known` is what `read` gives, where that is at hand."""
        self.readers, self.part = readers, part
        if part.at_once:
            self.found = {name: reader(part.pieces[0]) for name, reader in readers.items()}
        else:
            known = known or read(readers, part)
            self.found = {name: it.detach().requires_grad_() for name, it in known.items()}

    def backward(self, loss: Tensor) -> None:
        """Leaves the gradients of a loss of what was found."""
        loss.backward()
        if not self.part.at_once:
            for name, reader in self.readers.items():
                self._again(reader, self.found[name].grad)

    def _again(self, reader: Reader, grad: Tensor | None) -> None:
        """Each piece, with its share of what was found by it; one model at a time, and of that one piece."""
        if grad is None:
            return  # the loss does not ask for it
        first = 0
        for piece in self.part.pieces:
            found_R = reader(piece)
            found_R.backward(grad[first : first + len(found_R)])
            first += len(found_R)
        for piece in _spare(self.part):
            found_R = reader(piece)
            found_R.backward(torch.zeros_like(found_R))
