"""Low-rank adapters as peft defines and stores them: a layer computes W x + (alpha / rank) B A x, with W frozen.

Adapters are put into a transformers model in place. The model keeps its class, so that code which looks at the model's
class or layers works as it does without adapters. Only A and B are trained, published and kept in checkpoints.
"""

import copy
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tba.config import ModelConfig
from tba.errors import ConfigError, Damaged
from tba.models.file_checks import check_files, read_object
from tba.models.saving.weight_digests import whole_digest
from tba.models.saving.weight_files import Stored, Written, places_in, write_tensors

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_NAME, _PREFIX = "default", "base_model.model."  # the name of a model's adapter; prefix of stored tensors' names
_BASE = "base_sha256"  # key in the metadata of the stored tensors


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The kind of adapter that a run trains, and the base model. Every role has a copy of the base model."""

    rank: int
    alpha: float
    targets: str  # `all-linear`, or names of layers separated by commas
    base: Path  # a Hugging Face folder
    base_name: str  # the base model as the settings name it
    revision: str | None = None  # if the base is named on the hub
    base_sha256: str

    def put_into(self, model: PreTrainedModel, *, seed: int) -> None:
        """Put a fresh adapter, in float32, into a model. B is 0, so that the model's outputs stay the same. A is
        random and determined by the seed."""
        from peft import LoraConfig, inject_adapter_in_model

        targets = self._names or self.targets
        config = LoraConfig(r=self.rank, lora_alpha=self.alpha, target_modules=targets)  # pyright: ignore[reportArgumentType]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                inject_adapter_in_model(config, model, adapter_name=_NAME)
            except ValueError as error:
                raise ConfigError(f"model.lora_targets: {error}") from error
            self._check_layers(model)
            for layer in adapted(model).values():
                a, b = layer.lora_A[_NAME], layer.lora_B[_NAME]
                fresh = nn.init.kaiming_uniform_(torch.empty(a.weight.shape), a=5**0.5)  # on the CPU: same everywhere
                a.weight = nn.Parameter(fresh.to(a.weight.device))
                b.weight = nn.Parameter(torch.zeros(b.weight.shape, device=b.weight.device))
        model.eval()

    @property
    def _names(self) -> list[str]:
        """The layers to adapt, each given by the end of its name. Empty for `all-linear`."""
        return [] if self.targets == "all-linear" else [it.strip() for it in self.targets.split(",")]

    def check_names(self, model: PreTrainedModel) -> None:
        """Raise ConfigError if a name in `targets` matches no layer. peft itself complains only if no name matches any
        layer."""
        layers = [name.split(".") for name in adapted(model)]
        for name in self._names:
            parts = name.split(".")
            if not any(layer[-len(parts) :] == parts for layer in layers):
                raise ConfigError(
                    f"model.lora_targets: no layer of {self.base_name!r} is named {name!r}, got {self.targets!r}"
                )

    def _check_layers(self, model: PreTrainedModel) -> None:
        """Raise ConfigError if peft has adapted something other than a linear layer inside the model: embeddings, the
        output head, or experts whose weights are stacked in one tensor."""
        for name, layer in adapted(model).items():
            if not isinstance(layer.get_base_layer(), nn.Linear | Conv1D) or layer is model.get_output_embeddings():
                raise ConfigError(
                    f"model.lora_targets: only linear layers inside the model can be adapted, got {self.targets!r}, "
                    f"which names {name}"
                )

    def read_into(self, model: nn.Module, folder: Path) -> None:
        """Copy the adapter in a folder into a model. Raise Damaged if the folder holds no adapter of this kind, and
        ConfigError if the adapter is for another base. In both cases the model stays unchanged."""
        stored, held = self.read(folder), weights_of(model)
        shapes = ({name: it.shape for name, it in found.items()} for found in (stored, held))
        if next(shapes) != next(shapes):
            raise Damaged(f"the adapter in {folder} is not one of rank {self.rank} for the layers {self.targets}")
        with torch.no_grad():
            for name, weights in held.items():
                weights.copy_(stored[name])

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Return the weights in an adapter's folder, by the names under which they are stored. Raise ConfigError if the
        adapter is for another base, and Damaged if it cannot be read."""
        check_files(folder)
        try:
            with safe_open(folder / WEIGHTS, "pt") as file:
                self._check_base(folder, (file.metadata() or {}).get(_BASE, ""))
                return {name: file.get_tensor(name) for name in file.offset_keys()}
        except (OSError, SafetensorError) as error:
            raise Damaged(f"the adapter in {folder} cannot be read: {error}") from error

    def _check_base(self, folder: Path, made_for: str) -> None:
        """Raise ConfigError if an adapter was made for another base. Compare the digest of the base's weights and, if
        it is stored, the digest of its config."""
        names = ("weights", "a config.json")
        for name, theirs, ours in zip(names, made_for.split(" "), self.bases, strict=False):
            if theirs != ours:
                raise ConfigError(
                    f"model.path: the adapter in {folder} is for {name} with sha256 {theirs[:12]}…, but the model at "
                    f"{self.base_name or self.base} has {ours[:12]}…"
                )

    @cached_property
    def bases(self) -> tuple[str, str]:
        """Two digests that identify the base model: the digest of its weights and the digest of its config."""
        return self.base_sha256, config_sha256(self.base)


def adapter_like(model: ModelConfig, base: Path, *, base_sha256: str) -> Adapter:
    """Return the kind of adapter that the settings name."""
    return Adapter(
        rank=model.lora_rank,
        alpha=model.peft_alpha,
        targets=model.lora_targets,
        base=base,
        base_name=model.path,
        revision=None if model.revision == "main" else model.revision,
        base_sha256=base_sha256,
    )


@dataclass(frozen=True)
class AdapterSnapshot:
    """An immutable copy of an adapter, which any thread can save and hash."""

    adapter: Adapter
    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]

    def save(self, folder: Path, *, dtype: str | None = None, before: Path | None = None) -> Written:
        """Write the adapter as peft does. An adapter is small, so its weights keep the precision of training, whatever
        `dtype` is. Return the digest of the weights' file and, if `before` is the folder of an earlier version, the
        share of the weights that differ from it."""
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {_BASE: " ".join(self.adapter.bases)}  # one key only: safetensors would write several in any order
        weights = {name: Stored(it, it.dtype) for name, it in self.weights.items()}
        digest, changed = write_tensors(folder / WEIGHTS, weights, metadata, places_in(before) if before else None)
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2, sort_keys=True))
        elements = sum(it.numel() for it in self.weights.values())
        return Written({WEIGHTS: digest}, changed / elements if before else None)

    def digest(self, kind: str) -> str:
        """Return the digest of the adapter. It is small, so there is one kind only."""
        return self.sha256

    def digest_like(self, stored: str | None) -> str:
        return self.sha256

    @cached_property
    def sha256(self) -> str:
        """Digest of the base model's weights, the scale of the adapter and the adapter's weights."""
        adapter = self.adapter
        return whole_digest(self.weights, of=f"{adapter.base_sha256} {adapter.alpha} / {adapter.rank}\n")


def snapshot(
    model: PreTrainedModel, adapter: Adapter, whole: Callable[[Tensor], Tensor] = lambda weight: weight
) -> AdapterSnapshot:
    """Return a copy of a model's adapter in main memory. Further training does not change the copy. `whole` gathers a
    weight of which the model holds only a part."""
    gathered = {name: whole(it.detach()) for name, it in weights_of(model).items()}
    weights = {name: it.to("cpu", copy=True).contiguous() for name, it in gathered.items()}
    plain: dict[str, Any] = model.peft_config[_NAME].to_dict()  # pyright: ignore
    config = {name: sorted(it) if isinstance(it, set) else it for name, it in plain.items()}  # sets have no fixed order
    kinds = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True}
    base = {"base_model_name_or_path": adapter.base_name, "revision": adapter.revision}
    config |= {**kinds, **base, "target_modules": sorted(adapted(model))}
    return AdapterSnapshot(adapter, weights, config)


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return A and B of each adapted layer, by the names under which peft stores them."""
    return {
        f"{_PREFIX}{name}.{part}.weight": getattr(layer, part)[_NAME].weight
        for name, layer in adapted(model).items()
        for part in ("lora_A", "lora_B")
    }


def adapted(model: nn.Module) -> dict[str, Any]:
    """Return the layers that have an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}


@torch.no_grad()
def merge(model: PreTrainedModel) -> None:
    """Merge the adapter into the model's own weights in place: W + (alpha / rank) B A, summed in float32. The model
    then has no adapter, and all its weights can be trained."""
    for name, layer in adapted(model).items():
        plain = layer.get_base_layer()
        weight = plain.weight
        weight.copy_((weight.float() + layer.get_delta_weight(_NAME).float()).to(weight.dtype))
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, plain)
    del model.peft_config  # pyright: ignore
    model._hf_peft_config_loaded = False
    model.requires_grad_(True)


def copy_of(model: nn.Module) -> nn.Module:
    """Return a copy of a model. The copy shares the frozen parameters, because these never change."""
    return copy.deepcopy(model, {id(it): it for it in model.parameters() if not it.requires_grad})


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, it) for name, it in model.named_parameters() if it.requires_grad)


def config_sha256(folder: Path) -> str:
    """Return the digest of config.json in a Hugging Face folder. The fields that name the model's origin and the
    version of transformers are left out, so that copies of one model have equal digests."""
    config = read_object(folder / "config.json")
    plain = {name: it for name, it in config.items() if name not in ("transformers_version", "_name_or_path")}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def files_sha256(folder: Path) -> str:
    """Return one digest of the names and contents of all weight files (*.safetensors) in a Hugging Face folder. Raise
    Damaged, naming the file, if a file in the folder is damaged; the weights themselves are not checked."""
    check_files(folder)
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
