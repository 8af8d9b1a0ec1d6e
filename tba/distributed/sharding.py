"""A policy that no rank holds whole. Each rank has some rows of each weight. It has all rows only of the layer that it
is computing.

This is FSDP2 of torch, applied to each block of the transformer. Gradients are summed over all ranks; each rank
contributes the gradient of its share of the loss. With several copies of the weights, each rank gathers from the ranks
of its own copy, and gradients are summed over the ranks of a copy first, then over the copies.
"""

import copy
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.dynamic_module_utils import custom_object_save

from tba.distributed.ranks import Ranks, at_rest, whole
from tba.models import adapters
from tba.models.adapters import Adapter, AdapterSnapshot
from tba.models.policy import Policy, Snapshot
from tba.models.pretrained import attention_of, is_lowered
from tba.runtime.host_copies import HostCopies, size_of


@dataclass(frozen=True)
class ShardedPolicy(Policy):
    skeleton: PreTrainedModel  # the model without weights
    ranks: Ranks
    mesh: DeviceMesh
    lowers: bool  # True if ranks send each other weights in bfloat16, although they keep them in float32

    def twin(self) -> PreTrainedModel:
        """Return a copy of the model that is sharded in the same way. All ranks must call this together."""
        return self._twin(self.skeleton, self.model)

    def backbone_twin(self) -> PreTrainedModel:
        """Return a copy of the model without its output layer that is sharded in the same way. All ranks must call this
        together."""
        return self._twin(self.skeleton.base_model, self.model.base_model)

    def _twin(self, skeleton: Any, model: Any) -> PreTrainedModel:
        at_rest(self.model)
        twin = copy.deepcopy(skeleton)
        mine = dict(zip(map(id, _tensors(twin)), _tensors(model), strict=True))
        _shard(twin, self.mesh, lambda held: whole(mine[id(held)].detach()).clone(), self.lowers)
        return twin

    def spread(self, module: nn.Module) -> None:
        """Shard a small module whose parameters are equal at all ranks. Parameters that are a single number stay whole
        at every rank, and their gradients are summed by `Trained.add_up`."""
        _keep_part(module, self.mesh, MixedPrecisionPolicy(), {it for it in module.parameters() if not it.ndim})

    def snapshot(self) -> Snapshot | AdapterSnapshot:
        """Return, at rank 0, a copy of the model in main memory. All ranks must call this together; the other ranks get
        no weights of the model. On a GPU, only one weight at a time is whole. If only an adapter is trained, return a
        copy of the adapter, at every rank."""
        at_rest(self.model)
        if self.adapter:
            return adapters.snapshot(self.model, self.adapter, whole)
        memo, keeps = dict[int, Any](), self.ranks.rank == 0
        copies = HostCopies(size_of(_tensors(self.skeleton)))
        for held, mine in zip(self.skeleton.parameters(), self.model.parameters(), strict=True):
            full = whole(mine.detach())
            if keeps:
                memo[id(held)] = nn.Parameter(copies.copy(full) if full.is_cuda else full, requires_grad=False)
        for held, mine in zip(self.skeleton.buffers(), self.model.buffers(), strict=True):
            memo[id(held)] = copies.copy(mine)
        copies.finish()
        return Snapshot(copy.deepcopy(self.skeleton, memo), self.tokenizer)


def shard(
    bare: Policy, ranks: Ranks, device: torch.device, source: Policy | None = None, *, compute_dtype: str
) -> ShardedPolicy:
    """Shard a policy that has no weights, and give it the weights of `source`. Only rank 0 passes a `source`, a policy
    in main memory, which loses its weights."""
    lowers, mesh = is_lowered(bare.model, compute_dtype, device), _mesh(ranks, device)
    model, skeleton = bare.model, copy.deepcopy(bare.model)
    theirs: dict[int, Tensor] = {}
    if source:
        skeleton.generation_config = source.model.generation_config
        theirs |= dict(zip(map(id, _tensors(model)), _tensors(source.model), strict=True))

    def from_rank_0(held: Tensor) -> Tensor:
        full = torch.empty_like(held, device=device)
        if source:
            full.copy_(theirs[id(held)].detach())
        dist.broadcast(full, 0)
        return full

    _shard(model, mesh, from_rank_0, lowers)
    if source:
        theirs.clear()
        source.model.to("meta")  # pyright: ignore[reportArgumentType]
    return ShardedPolicy(
        model, bare.tokenizer, device, adapter=source.adapter if source else bare.adapter, skeleton=skeleton,
        ranks=ranks, mesh=mesh, lowers=lowers,
    )  # fmt: skip


def _mesh(ranks: Ranks, device: torch.device) -> DeviceMesh:
    """Return the mesh of all ranks. If there are several copies of the weights, the first dimension has the copies, and
    the second the parts of each."""
    if ranks.parts == ranks.size:
        return init_device_mesh(device.type, (ranks.size,))
    return init_device_mesh(device.type, (ranks.size // ranks.parts, ranks.parts), mesh_dim_names=("copies", "parts"))


def _shard(model: PreTrainedModel, mesh: DeviceMesh, fill: Callable[[Tensor], Tensor], lowers: bool) -> None:
    """Give a model without weights its weights, block by block, and keep only this rank's part of each block."""
    sent = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32) if lowers else MixedPrecisionPolicy()
    for module in (*_blocks(model), model):
        _fill(module, fill)
        _keep_part(module, mesh, sent)


def _keep_part(
    module: nn.Module, mesh: DeviceMesh, sent: MixedPrecisionPolicy, ignored: Collection[nn.Parameter] = ()
) -> None:
    """Keep only this rank's part of a module. Gradients are summed over all ranks."""
    shards = cast(FSDPModule, fully_shard(module, mesh=mesh, mp_policy=sent, ignored_params=set(ignored)))
    shards.set_gradient_divide_factor(1.0)
    shards.set_force_sum_reduction_for_comms(True)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def save_without_weights(policy: Policy, folder: str | Path) -> None:
    """Save config and tokenizer. For a model that transformers does not have, also save its code."""
    model = policy.model
    if model._auto_class is not None:
        custom_object_save(model, folder, config=model.config)  # pyright: ignore[reportArgumentType]
    model.config.save_pretrained(folder)
    policy.tokenizer.save_pretrained(folder)


def without_weights(
    folder: str | Path, *, dtype: torch.dtype, trust_remote_code: bool, adapter: Adapter | None = None
) -> Policy:
    """Load a policy without weights from a folder that `save_without_weights` has written. If only an adapter is
    trained, put one of the same kind into the model; of `adapter`, only its rank and layers matter here."""
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            config, dtype=dtype, trust_remote_code=trust_remote_code, **attention_of(config)
        )
    if adapter:
        adapter.put_into(model, seed=0)
    return Policy(model.eval(), tokenizer, torch.device("meta"), adapter=adapter)


def _blocks(model: PreTrainedModel) -> list[nn.Module]:
    """Return the blocks that are computed one after the other: the modules that transformers keeps on one device."""
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _fill(module: nn.Module, fill: Callable[[Tensor], Tensor]) -> None:
    """Fill the tensors of a module and its submodules that have no data yet. Tied tensors stay tied."""
    made: dict[int, Tensor] = {}
    for place, name, held in list(_held(module)):
        if not held.is_meta:
            continue
        if id(held) not in made:
            full = fill(held)
            made[id(held)] = nn.Parameter(full, held.requires_grad) if isinstance(held, nn.Parameter) else full
        place[name] = made[id(held)]


def _held(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    for part in module.modules():
        for place in (part._parameters, part._buffers):
            for name, held in place.items():
                if held is not None:
                    yield place, name, held
