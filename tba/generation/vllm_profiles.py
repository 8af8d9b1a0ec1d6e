"""The profiles of vLLM (`engine.profile`): the optimisations that an engine uses. This module does not import vLLM, so
that a plan can use it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tba.config import VLLMEngine

MODEL_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
"""Name of the environment variable that chooses between vLLM's two model runners. vLLM reads it while it makes the
configuration of an engine, and again in the processes of the engine, which inherit it."""
Resolved = Mapping[str, Any]
"""The number format and the optimisations of an engine, by name, as vLLM has resolved them."""
QUANTIZATIONS = {"fp8": "fp8_per_channel"}
"""vLLM's name for each value of `engine.quantization`. vLLM rounds the weights of linear layers when it loads them,
with one scale for each output of a layer, and does so again when a running engine loads a new version."""


class Switches(NamedTuple):
    """The optimisations of an engine. None leaves the choice to vLLM."""

    first_runner: bool = False  # True: the first model runner, not the second
    async_scheduling: bool | None = None  # whether a step is prepared while the GPU computes the one before it
    compiled: bool = True
    cuda_graphs: bool = True
    batched_tokens: int = 8192  # maximum number of tokens that a step reads
    graphs_for_all: bool = False  # whether CUDA graphs are recorded for batches of every size


PLAIN = Switches(first_runner=True, async_scheduling=False, compiled=False, cuda_graphs=False)
"""Without any optimisation. Engines on a CPU always run like this, so all tests without a GPU do too."""
PROFILES: Mapping[str, Switches] = {
    "safe": PLAIN,
    "default": Switches(),
    "fast": Switches(async_scheduling=True, batched_tokens=16384, graphs_for_all=True),
}


def switch_arguments(switches: Switches, engine: VLLMEngine, *, on_cpu: bool, batch_responses: int) -> dict[str, Any]:
    """Return the arguments of vLLM that stand for these switches and for the quantization."""
    compilation: dict[str, Any] = {}
    if not switches.compiled:
        compilation["mode"] = 0
    if not switches.cuda_graphs:
        compilation["cudagraph_mode"] = "NONE"
    elif switches.graphs_for_all:
        compilation["max_cudagraph_capture_size"] = max(512, batch_responses)  # vLLM itself stops at 512
    eager = on_cpu or not (switches.compiled or switches.cuda_graphs)
    return {
        "async_scheduling": switches.async_scheduling,
        "enforce_eager": eager,
        **({"compilation_config": compilation} if compilation and not eager else {}),
        **({"quantization": QUANTIZATIONS[engine.quantization]} if engine.quantization else {}),
    }


def switch_variables(switches: Switches) -> dict[str, str]:
    """Return the environment variables of these switches, for the processes of an engine."""
    return {MODEL_RUNNER: "0"} if switches.first_runner else {}


def resolved(config: Any) -> Resolved:
    """Return what vLLM has made of the arguments of an engine. `config` is its VllmConfig."""
    return {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "quantization": config.model_config.quantization,
        "model_runner": 2 if config.use_v2_model_runner else 1,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "compilation": config.compilation_config.mode.name,
        "cuda_graphs": config.compilation_config.cudagraph_mode.name,
    }


def describe(resolved: Resolved) -> str:
    """Return the number format and the optimisations of an engine in words."""
    rounded = f" with linear layers in {resolved['quantization']}" if resolved["quantization"] else ""
    return (
        f"{resolved['dtype']}{rounded}, model runner {resolved['model_runner']}, "
        f"{'asynchronous' if resolved['async_scheduling'] else 'synchronous'} scheduling, compilation "
        f"{resolved['compilation']}, CUDA graphs {resolved['cuda_graphs']}"
    )
