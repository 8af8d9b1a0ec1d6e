"""The adapters that an engine of vLLM holds beside its base model."""

from collections.abc import Collection
from itertools import count
from pathlib import Path
from typing import Any, get_args

from vllm.config.lora import MaxLoRARanks  # pyright: ignore[reportMissingImports]
from vllm.lora.request import LoRARequest  # pyright: ignore[reportMissingImports]
from vllm.v1.engine.llm_engine import LLMEngine  # pyright: ignore[reportMissingImports]

from tba.errors import Busy
from tba.models.adapters import Adapter
from tba.types import Version

ADAPTERS = 2  # that an engine holds: the adapter that responses in flight began with, and the next


def adapter_arguments(adapter: Adapter) -> dict[str, Any]:
    """Return the arguments of an engine that is to hold such adapters."""
    most = next(rank for rank in get_args(MaxLoRARanks) if rank >= adapter.rank)
    return {"enable_lora": True, "max_lora_rank": most, "max_loras": ADAPTERS, "max_cpu_loras": ADAPTERS}


class EngineAdapters:
    """Versions as adapters of one engine. A response is made by one of them from its beginning to its end."""

    def __init__(self, engine: LLMEngine):
        self.engine = engine
        self.held: dict[Version, LoRARequest] = {}
        self._numbers = count(1)

    def add(self, version: Version, folder: Path, *, used: Collection[Version]) -> None:
        """Add a version, and remove those that no response in flight uses. Busy if there is no room for another."""
        for old in [it for it in self.held if it not in used and it != version]:
            self.engine.remove_lora(self.held.pop(old).lora_int_id)
        if version in self.held:
            return
        if len(self.held) == ADAPTERS:
            raise Busy(f"version {version} waits for responses by the {ADAPTERS} adapters before it")
        request = LoRARequest(str(version), next(self._numbers), str(folder))
        self.engine.add_lora(request)
        self.held[version] = request
