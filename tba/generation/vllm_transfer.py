"""Load the weights of a version into a running vLLM engine: each of its workers reads them from the folder."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (  # pyright: ignore[reportMissingImports]
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.routed_experts import (  # pyright: ignore[reportMissingImports]
    RoutedExperts,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (  # pyright: ignore[reportMissingImports]
    ParallelLMHead,
)
from vllm.model_executor.model_loader.reload import (  # pyright: ignore[reportMissingImports]
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)


@dataclass
class Folder(WeightTransferInitInfo):
    path: str


@dataclass
class Nothing(WeightTransferUpdateInfo): ...


class FolderTransfer(WeightTransferEngine):
    """Reads the weights in each worker. All workers open all files of a version before any worker changes a weight, so
    a folder that cannot be read leaves the engine unchanged. Open files stay readable after the folder is removed."""

    init_info_cls, update_info_cls = Folder, Nothing
    files: Sequence[Any] = ()

    def init_transfer_engine(self, init_info: Folder) -> None:
        paths = sorted(Path(init_info.path).glob("*.safetensors"))
        self.files = [safe_open(path, framework="pt") for path in paths]
        if not paths:
            raise FileNotFoundError(f"no weights in {init_info.path}")

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Nothing) -> None:
        files, self.files = self.files, ()
        initialize_layerwise_reload(self.model)
        self.model.load_weights((name, file.get_tensor(name)) for file in files for name in file.offset_keys())
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            _pack_tied_heads(self.model)
            _pack_experts(self.model)

    def finish_weight_update(self) -> None: ...

    def shutdown(self) -> None: ...


def _pack_tied_heads(model: torch.nn.Module) -> None:
    """Pack the weights of the output heads again. On a CPU vLLM multiplies by a packed copy of a head's weights. vLLM
    packs them again only if the head itself was loaded, not if it shares its weights with the embedding."""
    heads: list[Any] = [layer for layer in model.modules() if isinstance(layer, ParallelLMHead)]
    for layer in heads:
        layer.quant_method.process_weights_after_loading(layer)


def _pack_experts(model: torch.nn.Module) -> None:
    """Pack the weights of experts again. On a CPU vLLM packs them only when it creates their kernel. Weights that are
    loaded later would stay unpacked, and the kernel would read them as packed."""
    layers: list[Any] = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
    for layer in layers:
        layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)
