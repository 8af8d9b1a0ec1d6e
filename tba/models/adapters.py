"""Low-rank adapters: a layer computes W x + (alpha / rank) B A x, with W frozen, as peft defines and stores them.

They are put into a model of transformers in place, which stays of its own class: whatever looks at that, or reads its
layers, works as without them. What is trained, published and kept in checkpoints is A and B alone.
"""

import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tba.errors import ConfigError, Damaged
from tba.models.file_checks import check_files, read_object

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_NAME, _PREFIX = "default", "base_model.model."  # of the one adapter in a model; of tensors as peft stores them
_BASE = "base_sha256"  # in the metadata of the stored tensors


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """What a run's adapters are, and the base that they are for, which every role has a copy of."""

    rank: int
    alpha: float
    targets: str  # `all-linear`, or names of layers with commas between them
    base: Path  # a Hugging Face folder
    base_name: str  # as the settings name it
    revision: str | None = None  # of a name of the hub
    base_sha256: str

    def put_into(self, model: PreTrainedModel, *, seed: int) -> None:
        """A fresh one, in float32: B is 0, so that the model computes what it did. A follows from the seed."""
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
                fresh = nn.init.kaiming_uniform_(torch.empty(a.weight.shape), a=5**0.5)  # the same on every device
                a.weight = nn.Parameter(fresh.to(a.weight.device))
                b.weight = nn.Parameter(torch.zeros(b.weight.shape, device=b.weight.device))
        model.eval()

    @property
    def _names(self) -> list[str]:
        """Of the layers that have an adapter, as they end; none where it is all of them."""
        return [] if self.targets == "all-linear" else [it.strip() for it in self.targets.split(",")]

    def check_names(self, model: PreTrainedModel) -> None:
        """ConfigError where one of several names is that of no layer: peft is content if any is."""
        layers = [name.split(".") for name in adapted(model)]
        for name in self._names:
            parts = name.split(".")
            if not any(layer[-len(parts) :] == parts for layer in layers):
                raise ConfigError(
                    f"model.lora_targets: no layer of {self.base_name!r} is named {name!r}, got {self.targets!r}"
                )

    def _check_layers(self, model: PreTrainedModel) -> None:
        """ConfigError where peft has adapted what is none: embeddings, or weights of experts, several in one tensor."""
        for name, layer in adapted(model).items():
            if not isinstance(layer.get_base_layer(), nn.Linear | Conv1D) or layer is model.get_output_embeddings():
                raise ConfigError(
                    f"model.lora_targets: linear layers inside the model can be adapted, got {self.targets!r}, which "
                    f"names {name}"
                )

    def read_into(self, model: nn.Module, folder: Path) -> None:
        """Damaged if the folder does not hold such an adapter, ConfigError if it is of another base; the model then
        has what it had."""
        stored, held = self.read(folder), weights_of(model)
        shapes = ({name: it.shape for name, it in found.items()} for found in (stored, held))
        if next(shapes) != next(shapes):
            raise Damaged(f"the adapter in {folder} is not one of rank {self.rank} for {self.targets}")
        with torch.no_grad():
            for name, weights in held.items():
                weights.copy_(stored[name])

    def read(self, folder: Path) -> dict[str, Tensor]:
        """Its weights by the names that they are stored under, after a look whether it is of this base."""
        check_files(folder)
        try:
            with safe_open(folder / WEIGHTS, "pt") as file:
                self._check_base(folder, (file.metadata() or {}).get(_BASE, ""))
                return {name: file.get_tensor(name) for name in file.offset_keys()}
        except (OSError, SafetensorError) as error:
            raise Damaged(f"the adapter in {folder} cannot be read: {error}") from error

    def _check_base(self, folder: Path, made_for: str) -> None:
        """By its weights and, where it is said, by its config."""
        names = ("weights", "a config.json")
        for name, theirs, ours in zip(names, made_for.split(" "), self.bases, strict=False):
            if theirs != ours:
                raise ConfigError(
                    f"model.path: the adapter in {folder} is for {name} with sha256 {theirs[:12]}…, and what lies at "
                    f"{self.base_name or self.base} has {ours[:12]}…"
                )

    @cached_property
    def bases(self) -> tuple[str, str]:
        """What it is for: digests of the base's weights, and of how it computes with them."""
        return self.base_sha256, config_sha256(self.base)


@dataclass(frozen=True)
class AdapterSnapshot:
    """An adapter at rest, to be saved and hashed from any thread."""

    adapter: Adapter
    weights: Mapping[str, Tensor]
    config: Mapping[str, Any]

    def save(self, folder: Path, *, dtype: str | None = None) -> None:
        """As peft stores it, in the precision that it is trained in: it is small."""
        folder.mkdir(parents=True, exist_ok=True)
        metadata = {_BASE: " ".join(self.adapter.bases)}  # no more keys: safetensors writes several in any order
        save_file(dict(self.weights), folder / WEIGHTS, metadata)
        (folder / CONFIG).write_text(json.dumps(self.config, indent=2, sort_keys=True))

    @cached_property
    def sha256(self) -> str:
        """Of the base, the scale and the adapter's weights."""
        adapter = self.adapter
        return tensors_sha256(self.weights, of=f"{adapter.base_sha256} {adapter.alpha} / {adapter.rank}\n")


def snapshot(model: PreTrainedModel, adapter: Adapter) -> AdapterSnapshot:
    """A copy in main memory that training does not touch."""
    weights = {name: it.detach().to("cpu", copy=True).contiguous() for name, it in weights_of(model).items()}
    plain: dict[str, Any] = model.peft_config[_NAME].to_dict()  # pyright: ignore
    config = {name: sorted(it) if isinstance(it, set) else it for name, it in plain.items()}  # the same every time
    kinds = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "inference_mode": True}
    base = {"base_model_name_or_path": adapter.base_name, "revision": adapter.revision}
    config |= {**kinds, **base, "target_modules": sorted(adapted(model))}
    return AdapterSnapshot(adapter, weights, config)


def weights_of(model: nn.Module) -> dict[str, nn.Parameter]:
    """A and B of each layer, by the names that peft stores them under."""
    return {
        f"{_PREFIX}{name}.{part}.weight": getattr(layer, part)[_NAME].weight
        for name, layer in adapted(model).items()
        for part in ("lora_A", "lora_B")
    }


def adapted(model: nn.Module) -> dict[str, Any]:
    """The layers that have an adapter, by name."""
    from peft.tuners.lora import LoraLayer

    return {name: layer for name, layer in model.named_modules() if isinstance(layer, LoraLayer)}


@torch.no_grad()
def merge(model: PreTrainedModel) -> None:
    """The model becomes a plain one, whose weights are W + (alpha / rank) B A, summed in float32."""
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
    """A copy that shares what is frozen, as it never differs."""
    return copy.deepcopy(model, {id(it): it for it in model.parameters() if not it.requires_grad})


def trainable(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, it) for name, it in model.named_parameters() if it.requires_grad)


def tensors_sha256(tensors: Mapping[str, Tensor], *, of: str = "") -> str:
    """Their names in order, types, shapes and bytes."""
    digest = hashlib.sha256(of.encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def config_sha256(folder: Path) -> str:
    """Of what config.json says in a Hugging Face folder, but for who wrote it."""
    said = read_object(folder / "config.json")
    plain = {name: it for name, it in said.items() if name not in ("transformers_version", "_name_or_path")}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def files_sha256(folder: Path) -> str:
    """Return the sha256 of the weights in a Hugging Face folder, as they are stored. Damaged if a file is damaged."""
    check_files(folder)
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
