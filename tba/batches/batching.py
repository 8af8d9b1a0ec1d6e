"""Turn fetched trajectories into padded tensors. The tensors of a batch get their shapes here.

A batch consists of groups, in the order of the draw. A group has K rows with the same prompt. It is never split,
because the residual of a row is a difference from the mean of its group. Rows are padded on the right.
"""
# Shapes: B = P x K rows, P prompts (groups), K responses per prompt, T tokens of prompt and response with padding.

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tba.errors import ConfigError, DataError
from tba.fetched import Fetched, Lists
from tba.types import Draw, Metrics


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The data from which a gradient step, or a part of one, is computed."""

    tokens_BT: Tensor  # int64: prompt, response, padding
    response_mask_BT: Tensor  # bool: counted tokens, all written by the policy; without EOS if the objective omits it
    reward_B: Tensor  # float32
    responses_per_prompt: int  # K
    lengths: tuple[int, ...]  # B: tokens of each row without padding
    ref_logp_B: Tensor | None = None  # float32: log-probability of the counted tokens under the reference
    ref_logp_BT: Tensor | None = None  # float32: log-probability of each counted token under the reference; 0 elsewhere
    behaviour_logp_BT: Tensor | None = None  # float32: log-probability of each counted token when sampled; 0 elsewhere
    reference_power: float = 1.0  # power of the reference in the target of this gradient step
    step_value_BT: Tensor | None = None  # float32: value of the state before the token's reasoning step; 0 elsewhere
    step_next_BT: Tensor | None = None  # float32: value of the state after this reasoning step; 0 elsewhere

    @property
    def groups(self) -> int:
        return len(self.lengths) // self.responses_per_prompt


def batch_metrics(draws: Sequence[Draw], batch: Batch) -> Metrics:
    """Return the metrics that can be computed from a batch before anything is learned from it."""
    n = len(draws)
    return known(
        {
            "reward_mean": float(batch.reward_B.mean()),
            "age_mean": sum(d.age for d in draws) / n,
            "age_max": float(max(d.age for d in draws)),
            "recent_share": sum(d.branch == "recent" for d in draws) / n,
            "tokens": float(batch.response_mask_BT.sum()),
        }
    )


def known(metrics: Metrics) -> Metrics:
    """Return the metrics that are finite. Any other metric would make every sum or mean with it useless."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


class Padded(NamedTuple):
    """Rows of prompt and response, padded on the right. `lengths` has the number of tokens of each row."""

    tokens_BT: Tensor
    response_mask_BT: Tensor
    lengths: tuple[int, ...]


def collate(
    fetched: Fetched,
    *,
    responses_per_prompt: int,
    pad_id: int,
    include_eos: bool,
    by_token: bool = False,
    by_step: bool = False,
    needs_reference: bool = True,
    device: torch.device | str = "cpu",
) -> Batch:
    """Make a batch in which each K consecutive rows are a group.

    A finished response ends with EOS, which counts if `include_eos` is true. All tokens of a truncated response count.
    The EOS of an earlier turn always counts, because with it the policy hands over to the environment. The model reads
    the environment's tokens, but they never count, whatever log-probabilities are stored for them. With `by_token`, the
    batch also has the log-probabilities of each token. With `by_step`, it also has the values of the states before and
    after each reasoning step. If rows were stored without log-probabilities under the reference, the batch has none of
    them. With `needs_reference`, such rows are an error.
    """
    _check_groups(fetched, responses_per_prompt)
    counted_B = _counted(fetched, include_eos)
    padded = _pad(fetched.prompt_tokens, fetched.response_tokens.first(counted_B), pad_id=pad_id, device=device)
    own = None if (mask := _loss_mask(fetched)) is None else mask.first(counted_B)
    ref_logps = _ref_logps(fetched, needed=needs_reference)
    ref_logps = None if ref_logps is None else ref_logps.first(counted_B).where(own)
    tokens = dict[str, Tensor]()
    if by_token:
        if ref_logps is not None:
            tokens["ref_logp_BT"] = _spread(ref_logps, padded)
        tokens["behaviour_logp_BT"] = _spread(_behaviour_logps(fetched).first(counted_B).where(own), padded)
    if by_step:
        value, following = _step_values(fetched)
        tokens["step_value_BT"] = _spread(value.first(counted_B), padded)
        tokens["step_next_BT"] = _spread(following.first(counted_B), padded)
    return Batch(
        tokens_BT=padded.tokens_BT,
        response_mask_BT=padded.response_mask_BT if own is None else _spread(own, padded).bool(),
        reward_B=torch.tensor(fetched.reward_B, dtype=torch.float32, device=device),
        responses_per_prompt=responses_per_prompt,
        lengths=padded.lengths,
        ref_logp_B=None if ref_logps is None else torch.from_numpy(ref_logps.sums()).float().to(device),
        ref_logp_BT=tokens.get("ref_logp_BT"),
        behaviour_logp_BT=tokens.get("behaviour_logp_BT"),
        step_value_BT=tokens.get("step_value_BT"),
        step_next_BT=tokens.get("step_next_BT"),
    )


def pad(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    pad_id: int,
    device: torch.device | str = "cpu",
) -> Padded:
    """Return rows of prompt and response, padded on the right to the longest row. The mask is true on the response."""
    return _pad(Lists.of(prompts, np.int64), Lists.of(responses, np.int64), pad_id=pad_id, device=device)


def _pad(prompts: Lists, responses: Lists, *, pad_id: int, device: torch.device | str) -> Padded:
    start_B = prompts.lengths_B
    end_B = start_B + responses.lengths_B
    if not start_B.all():
        raise DataError(f"row {int(start_B.argmin())}: a prompt needs at least 1 token, got 0")
    column_T = np.arange(end_B.max())
    prompt_mask_BT = column_T < start_B[:, None]
    response_mask_BT = ~prompt_mask_BT & (column_T < end_B[:, None])
    tokens_BT = np.full((len(end_B), len(column_T)), pad_id, np.int64)
    tokens_BT[prompt_mask_BT] = prompts.elements_N
    tokens_BT[response_mask_BT] = responses.elements_N
    return Padded(
        torch.from_numpy(tokens_BT).to(device), torch.from_numpy(response_mask_BT).to(device), tuple(end_B.tolist())
    )


def buckets(lengths: Sequence[int], tokens_per_batch: int) -> Iterator[list[int]]:
    """Yield the indices of rows in batches, in the order of the rows' lengths. A batch has at most `tokens_per_batch`
    tokens with padding, or is a single row."""
    bucket: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if bucket and (len(bucket) + 1) * lengths[index] > tokens_per_batch:
            yield bucket
            bucket = []
        bucket.append(index)
    if bucket:
        yield bucket


def stretches(count: int, cost: Callable[[slice], int], most: int | None) -> Iterator[slice]:
    """Divide `count` items into slices, in order. The cost of a slice is at most `most`, or the slice has a single
    item. If `most` is None, there is one slice."""
    first = 0
    for last in range(1, count):
        if most is not None and cost(slice(first, last + 1)) > most:
            yield slice(first, last)
            first = last
    yield slice(first, count)


def groups_in(batch: Batch, groups: slice) -> Batch:
    """Return a range of a batch's groups as a batch, padded only to the longest of its own rows."""
    rows = slice(groups.start * batch.responses_per_prompt, groups.stop * batch.responses_per_prompt)
    width = max(batch.lengths[rows])
    return Batch(
        tokens_BT=batch.tokens_BT[rows, :width],
        response_mask_BT=batch.response_mask_BT[rows, :width],
        reward_B=batch.reward_B[rows],
        responses_per_prompt=batch.responses_per_prompt,
        lengths=batch.lengths[rows],
        ref_logp_B=None if batch.ref_logp_B is None else batch.ref_logp_B[rows],
        ref_logp_BT=None if batch.ref_logp_BT is None else batch.ref_logp_BT[rows, :width],
        behaviour_logp_BT=None if batch.behaviour_logp_BT is None else batch.behaviour_logp_BT[rows, :width],
        reference_power=batch.reference_power,
        step_value_BT=None if batch.step_value_BT is None else batch.step_value_BT[rows, :width],
        step_next_BT=None if batch.step_next_BT is None else batch.step_next_BT[rows, :width],
    )


def groups_at(batch: Batch, groups: Sequence[int]) -> Batch:
    """Return the groups with these numbers as a batch, in the order of `groups`."""
    k = batch.responses_per_prompt
    rows = [group * k + j for group in groups for j in range(k)]
    tensors = {it.name: value for it in fields(batch) if isinstance(value := getattr(batch, it.name), Tensor)}
    return replace(
        batch, lengths=tuple(batch.lengths[row] for row in rows), **{name: it[rows] for name, it in tensors.items()}
    )


def first_equal_rows(batch: Batch) -> list[int]:
    """Return, for each row, the index of the first row with the same tokens and the same mask."""
    first: dict[tuple[int, bytes, bytes], int] = {}
    tokens_BT, mask_BT = batch.tokens_BT.cpu().numpy(), batch.response_mask_BT.cpu().numpy()
    keys = ((n, tokens_BT[row].tobytes(), mask_BT[row].tobytes()) for row, n in enumerate(batch.lengths))
    return [first.setdefault(key, row) for row, key in enumerate(keys)]


def prompt_lengths(batch: Batch) -> Tensor:
    """Return [P]: the number of tokens before the first token that counts in any response to a prompt. If no token of
    the responses counts, this can be more than the length of the prompt."""
    mask_BT = batch.response_mask_BT
    length_B = torch.tensor(batch.lengths, device=mask_BT.device)
    before_B = torch.where(mask_BT.any(dim=1), mask_BT.int().argmax(dim=1), length_B)
    return before_B.unflatten(0, (-1, batch.responses_per_prompt)).amin(dim=1)


def _spread(values: Lists, padded: Padded) -> Tensor:
    """Return [B, T]: the number of each response token at the position of this token, and 0 elsewhere."""
    mask_BT = padded.response_mask_BT.cpu()
    spread_BT = torch.zeros(mask_BT.shape, dtype=torch.float32).masked_scatter(
        mask_BT, torch.from_numpy(values.elements_N).float()
    )
    return spread_BT.to(padded.tokens_BT.device)


def _ref_logps(fetched: Fetched, *, needed: bool) -> Lists | None:
    if fetched.ref_logps is not None:
        _check_lengths(fetched, fetched.ref_logps, "reference log-probabilities")
    elif needed:
        raise DataError(
            "the objective needs log-probabilities under the reference, and the batch has rows that were stored "
            "without them: when they were generated, search.reference_logps was 'needed', and the objective did not "
            "need them"
        )
    return fetched.ref_logps


def _behaviour_logps(fetched: Fetched) -> Lists:
    if fetched.behaviour_logps is None:
        raise DataError("the batch was fetched without the log-probabilities that its tokens had when sampled")
    _check_lengths(fetched, fetched.behaviour_logps, "log-probabilities from the time of sampling")
    return fetched.behaviour_logps


def _step_values(fetched: Fetched) -> tuple[Lists, Lists]:
    """Return two numbers for each response token: the value of the state before the token's reasoning step, and the
    value of the state after this step. After the last step, the value is the reward."""
    ends, values = fetched.step_ends, fetched.step_values
    if ends is None or values is None:
        raise DataError("the batch was fetched without the values of its steps")
    for row in np.flatnonzero(ends.lengths_B == 0):
        raise DataError(
            f"trajectory {fetched.trajectory_ids[row]!r} has no values of its steps: when it was generated, "
            "search.value_samples was 0"
        )
    last_B = np.cumsum(ends.lengths_B) - 1
    sizes_N = np.diff(ends.elements_N, prepend=0)
    sizes_N[last_B[:-1] + 1] = ends.elements_N[last_B[:-1] + 1]
    next_N = np.append(values.elements_N[1:], 0)
    next_N[last_B] = fetched.reward_B
    lengths_B = ends.elements_N[last_B].astype(np.int64)
    value = Lists(np.repeat(values.elements_N, sizes_N), lengths_B)
    following = Lists(np.repeat(next_N, sizes_N), lengths_B)
    _check_lengths(fetched, value, "tokens in its steps")
    return value, following


def _loss_mask(fetched: Fetched) -> Lists | None:
    if fetched.loss_mask is not None:
        _check_lengths(fetched, fetched.loss_mask, "entries of the loss mask")
    return fetched.loss_mask


def _counted(fetched: Fetched, include_eos: bool) -> np.ndarray:
    """Return the number of tokens of each response that count in the loss: all, or, if `include_eos` is false, all but
    the EOS of a finished response."""
    length_B = fetched.response_tokens.lengths_B
    if include_eos:
        return length_B
    for row in np.flatnonzero(fetched.finished_B & (length_B == 0)):
        raise DataError(f"trajectory {fetched.trajectory_ids[row]!r}: finished, but without an EOS token")
    return length_B - fetched.finished_B


def _check_lengths(fetched: Fetched, values: Lists, what: str) -> None:
    length_B = fetched.response_tokens.lengths_B
    for row in np.flatnonzero(length_B != values.lengths_B):
        raise DataError(
            f"trajectory {fetched.trajectory_ids[row]!r}: {length_B[row]} response tokens, "
            f"but {values.lengths_B[row]} {what}"
        )


def _check_groups(fetched: Fetched, k: int) -> None:
    if k < 2:
        raise ConfigError(f"training.responses_per_prompt must be >= 2, or nothing is learned, got {k}")
    if not len(fetched) or len(fetched) % k:
        raise DataError(f"a batch must have whole groups of {k} trajectories, got {len(fetched)} trajectories")
    for first in range(0, len(fetched), k):
        prompts = dict.fromkeys(fetched.prompt_ids[first : first + k])
        if len(prompts) > 1:
            raise DataError(
                f"all rows of group {first // k} (rows {first} to {first + k - 1}) must have the same prompt, got "
                f"{', '.join(map(repr, prompts))}"
            )
