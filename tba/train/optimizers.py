"""The forms of AdamW that a trainer can use: torch's own, one with moments of 8 bits, and one whose moments and updates
are in main memory.

Every form keeps its state in plain tensors, for the part of each parameter that a process holds. The rows of these
tensors are the rows of the parameter. So any number of ranks can read the state that any number of ranks has stored.
"""
# Shapes: N rows, C columns, of a weight as a matrix whose columns are its last dimension; B blocks of a row.

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw
from torch.optim.optimizer import Optimizer

from tba.config import OptimizerName, TrainingConfig, same_moments
from tba.distributed.ranks import by_kind, held
from tba.errors import ConfigError

SMALL = 4096  # a parameter with fewer numbers, or without columns, keeps its moments in full precision
BLOCK = 256  # numbers of a row that share a scale
NUMBERS_AT_ONCE = 2**22  # numbers whose moments are in full precision at the same time, during an update
_DECADES = 7  # powers of ten that the levels span


def make_optimizer(parameters: Sequence[nn.Parameter], training: TrainingConfig, *, learning_rate: float) -> Optimizer:
    options: dict[str, Any] = {
        "lr": learning_rate,
        "betas": (training.adam_beta1, training.adam_beta2),
        "eps": training.adam_eps,
        "weight_decay": training.weight_decay,
    }
    if training.optimizer == "adamw-8bit":
        return AdamW8bit(parameters, options)
    if training.optimizer == "adamw-on-host":
        return AdamWOnHost(parameters, options)
    fused = training.optimizer == "adamw-fused" or parameters[0].device.type == "cuda"
    groups = [{"params": kind} for kind in by_kind(parameters)]
    if [id(it) for group in groups for it in group["params"]] != [id(it) for it in parameters]:
        raise ValueError("parameters that are not sharded must come last, or the numbers of parameters would change")
    return torch.optim.AdamW(groups, **options, fused=fused or None)  # None lets torch choose, unlike False


def check_fits(stored: OptimizerName, chosen: OptimizerName) -> None:
    """Raise ConfigError if the optimizer `chosen` cannot continue with the moments that the optimizer `stored` has
    stored."""
    if not same_moments(stored, chosen):
        raise ConfigError(
            f"training.optimizer must be {stored!r}, which wrote the checkpoint, or an optimizer with moments of the "
            f"same form, got {chosen!r}"
        )


class HeldAdamW(Optimizer):
    """AdamW that updates only the part of each parameter that this process holds."""

    def __init__(self, parameters: Sequence[nn.Parameter], options: dict[str, Any]):
        super().__init__(parameters, options)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # pyright: ignore
        assert closure is None
        for group in self.param_groups:
            options = {name: group[name] for name in ("lr", "eps", "weight_decay")}
            options |= dict(zip(("beta1", "beta2"), group["betas"], strict=True))
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state |= {"step": torch.zeros((), device=self.place(parameter)), **self.begin(parameter)}
                self.move(held(parameter), held(parameter.grad), state, options)

    def restore(self, state: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Set the state of each parameter. `state` has the numbers of the parameters as keys, as in `state_dict`."""
        parameters = [it for group in self.param_groups for it in group["params"]]
        self.state.clear()
        for i, tensors in state.items():
            place = self.place(parameters[i])
            self.state[parameters[i]] = {name: it.to(place) for name, it in tensors.items()}

    def place(self, parameter: Tensor) -> torch.device:
        """Return the device of a parameter's state."""
        raise NotImplementedError

    def begin(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the moments of a parameter before the first step."""
        raise NotImplementedError

    def move(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], options: dict[str, Any]) -> None:
        raise NotImplementedError


def _move(weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: Tensor, options: dict[str, Any]) -> None:
    """Take one step of torch's fused AdamW, which changes all tensors except the gradient in place."""
    first, second = moments
    adamw([weight], [gradient], [first], [second], [], [step], fused=True, amsgrad=False, maximize=False, **options)


class AdamWOnHost(HeldAdamW):
    """AdamW in main memory. One parameter at a time, the gradient and the weight are copied to main memory, and the new
    weight is copied back."""

    def __init__(self, parameters: Sequence[nn.Parameter], options: dict[str, Any]):
        super().__init__(parameters, options)
        self.most = max(held(it.detach()).numel() for it in parameters)
        self.rooms: dict[tuple[str, torch.dtype], Tensor] = {}

    def place(self, parameter: Tensor) -> torch.device:
        return torch.device("cpu")

    def begin(self, parameter: Tensor) -> dict[str, Tensor]:
        mine = held(parameter)
        return {name: torch.zeros(mine.shape, dtype=mine.dtype) for name in ("exp_avg", "exp_avg_sq")}

    def move(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], options: dict[str, Any]) -> None:
        here, gradient_here = self._brought("weight", weight), self._brought("gradient", gradient)
        _move(here, gradient_here, (state["exp_avg"], state["exp_avg_sq"]), state["step"], options)
        weight.copy_(here)

    def _brought(self, what: str, tensor: Tensor) -> Tensor:
        """Copy a tensor into a buffer in main memory, which all parameters share. For a tensor on a GPU the buffer is
        pinned, so that the GPU writes into it directly."""
        key = what, tensor.dtype
        if key not in self.rooms:
            self.rooms[key] = torch.empty(self.most, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        return self.rooms[key][: tensor.numel()].view(tensor.shape).copy_(tensor)


class AdamW8bit(HeldAdamW):
    """AdamW with moments of 8 bits, by Dettmers et al., 8-bit Optimizers via Block-wise Quantization
    (arXiv:2110.02861). Each block of a moment stores its largest magnitude as a scale, and for each number the nearest
    of 256 levels relative to the scale. Blocks end with rows. A second moment is never rounded down to 0, as the next
    step would divide by it."""

    def place(self, parameter: Tensor) -> torch.device:
        return parameter.device

    def begin(self, parameter: Tensor) -> dict[str, Tensor]:
        mine, names = held(parameter), ("exp_avg", "exp_avg_sq")
        if parameter.ndim < 2 or parameter.numel() < SMALL:  # counted over all ranks, so that they agree
            return {name: torch.zeros_like(mine, dtype=_precise(mine), requires_grad=False) for name in names}
        blocks = -(-mine.shape[-1] // BLOCK)
        codes = {f"{it}_codes": torch.zeros(mine.shape, dtype=torch.uint8, device=mine.device) for it in names}
        return codes | {f"{it}_scales": torch.zeros((*mine.shape[:-1], blocks), device=mine.device) for it in names}

    def move(self, weight: Tensor, gradient: Tensor, state: dict[str, Tensor], options: dict[str, Any]) -> None:
        if "exp_avg" in state:
            self._move_some(weight, gradient, (state["exp_avg"], state["exp_avg_sq"]), state["step"], options)
            return
        names = [f"{moment}_{part}" for moment in ("exp_avg", "exp_avg_sq") for part in ("codes", "scales")]
        rows = max(1, NUMBERS_AT_ONCE // weight.shape[-1])
        cut = [
            it.view(-1, it.shape[-1]).split(rows)
            for it in (weight, gradient.contiguous(), *(state[it] for it in names))
        ]
        for weight_NC, gradient_NC, codes1_NC, scales1_NB, codes2_NC, scales2_NB in zip(*cut, strict=True):
            first_NC = dequantised(codes1_NC, scales1_NB, signed=True).to(_precise(weight))
            second_NC = dequantised(codes2_NC, scales2_NB, signed=False).to(_precise(weight))
            self._move_some(weight_NC, gradient_NC, (first_NC, second_NC), state["step"].clone(), options)
            quantise(first_NC, codes1_NC, scales1_NB, signed=True)
            quantise(second_NC, codes2_NC, scales2_NB, signed=False)
        state["step"] += 1

    def _move_some(
        self, weight: Tensor, gradient: Tensor, moments: Sequence[Tensor], step: Tensor, options: dict[str, Any]
    ) -> None:
        precise = weight.to(dtype := _precise(weight))
        _move(precise, gradient.to(dtype), moments, step, options)
        if precise is not weight:
            weight.copy_(precise)


def _precise(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def dequantised(codes_NC: Tensor, scales_NB: Tensor, *, signed: bool) -> Tensor:
    """Return [N, C]: the numbers that the codes stand for."""
    levels, _ = _levels(signed, codes_NC.device)
    return levels[codes_NC.int()].mul_(_spread(scales_NB, codes_NC))


def quantise(number_NC: Tensor, codes_NC: Tensor, scales_NB: Tensor, *, signed: bool) -> None:
    """Quantise the numbers, and write their codes and scales into `codes_NC` and `scales_NB`. If `signed` is false, no
    number gets the code that stands for 0."""
    columns, blocks = number_NC.shape[-1], scales_NB.shape[-1]
    padded_NC = nn.functional.pad(number_NC.abs(), (0, blocks * BLOCK - columns))
    scales_NB.copy_(padded_NC.unflatten(1, (blocks, BLOCK)).amax(dim=-1))
    _, between = _levels(signed, codes_NC.device)
    relative_NC = number_NC / _spread(scales_NB, codes_NC).clamp_(min=torch.finfo(torch.float32).tiny)
    nearest_NC = torch.bucketize(relative_NC.float(), between, right=True, out_int32=True)
    codes_NC.copy_(nearest_NC if signed else nearest_NC.clamp_(min=1))


def _spread(scales_NB: Tensor, codes_NC: Tensor) -> Tensor:
    return scales_NB.repeat_interleave(BLOCK, dim=1)[:, : codes_NC.shape[-1]]


@cache
def _levels(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the 256 levels, and the borders between them. The levels are 0, 1 and, in each of seven decades, the
    middles of equal parts. Each decade has twice as many parts as the decade below. Signed levels include the negatives
    of the middles."""
    positive = [0.0]
    for decade in range(_DECADES):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        positive += ((edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade + 1 - _DECADES)).tolist()
    negative = [-it for it in reversed(positive[1:])] if signed else []
    levels = torch.tensor([*negative, *positive, 1.0])
    return levels.to(device), ((levels[1:] + levels[:-1]) / 2).to(device)
