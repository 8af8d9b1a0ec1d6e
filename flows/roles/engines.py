"""Choose what generates responses on this machine: vLLM if it is installed and suits the settings, else transformers.
Neither is imported before it is chosen."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from flows.supervision.gpus import engine_start
from storage.runs.events import Events
from tba.config import Config, CustomEngine, VLLMEngine
from tba.errors import ConfigError
from tba.generation.vllm_profiles import Resolved, describe
from tba.interfaces import Generator
from tba.runtime.loading import load_class

if TYPE_CHECKING:
    from tba.models.adapters import Adapter

LEAST_TEMPERATURE = 0.01  # vLLM replaces any lower temperature by this one, except 0
MOST_TEMPERATURE = 2  # vLLM refuses any higher temperature
LEAST_PARAMETERS = 50_000_000
"""Smallest model for which vLLM is preferred on a CPU. With one thread and 64 responses of 32 tokens, vLLM was 0.5 and
0.9 times as fast as our generator with transformers at 0.6 and 3.4 million parameters, 1.2 and 1.0 times at 13 and 33
million, and 2.9 times at 134 million (30 layers); it takes 12 to 28 seconds to start."""


class Engine(NamedTuple):
    name: str
    why: str


class Sampling(NamedTuple):
    """How a role samples, as far as this decides whether vLLM can serve the role."""

    lowest: float  # lowest sampling temperature
    highest: float  # highest sampling temperature
    at_one: bool  # True if the temperature is always 1
    cut: str  # the top-p setting that restricts sampling to the most likely tokens; empty if there is none
    reads_logps: bool = True  # True if the role uses the log-probabilities of the sampled tokens


def open_generator(
    config: Config,
    events: Events,
    sampling: Sampling,
    parameters: Callable[[], int],
    adapter: "Adapter | None" = None,
) -> Generator:
    """Return the generator that suits the settings, this machine and the size of the model. `parameters` returns this
    size; it is called only on a CPU, because it may have to download the model. The generator has no weights before it
    adopts a version. With `adapter`, all versions are adapters for the base model of this adapter."""
    from tba.models.pretrained import resolve_device

    device = resolve_device(config.model.device).type
    installed = find_spec("vllm") is not None
    size = parameters() if installed and device == "cpu" and config.engine.name == "auto" else 0
    engine = choose(config, sampling, device=device, installed=installed, parameters=size)
    profile = config.engine.profile if engine.name == "vllm" and isinstance(config.engine, VLLMEngine) else None
    events.write(
        "engine-chosen", f"responses come from {engine.name}: {engine.why}", engine=engine.name, profile=profile
    )
    if isinstance(config.engine, CustomEngine):
        return load_class("engine.name", config.engine.name)(config, adapter)
    common: dict[str, Any] = {
        "dtype": config.model.publish_dtype,
        "batch_responses": config.search.batch_responses,
        "max_response_tokens": config.search.max_response_tokens,
        "trust_remote_code": config.model.trust_remote_code,
        "adapter": adapter,
    }
    if engine.name == "vllm":
        from tba.generation.vllm_generator import VLLMGenerator

        assert isinstance(config.engine, VLLMEngine)
        return VLLMGenerator(
            **common,
            on_cpu=device == "cpu",
            max_prompt_tokens=config.search.max_prompt_tokens,
            logps="at-one" if sampling.at_one else "uncut" if sampling.reads_logps else "any",
            engine=config.engine,
            parks=config.model.gpu_shifts,
            starting=(lambda: nullcontext(1)) if device == "cpu" else partial(starting, config),
            tell=partial(tell_start, config.engine, events, on_cpu=device == "cpu"),
        )
    from tba.generation.transformers_generator import TransformersGenerator

    return TransformersGenerator(**common, device=config.model.device)


@contextmanager
def starting(config: Config) -> Iterator[int]:
    """Let no other engine start meanwhile. Yield how many roles share the GPU at the same time."""
    with engine_start() as roles:
        yield 1 if config.model.gpu_shifts else roles


def tell_start(engine: VLLMEngine, events: Events, roles: int, resolved: Resolved, *, on_cpu: bool) -> None:
    """Write an event about an engine that starts: the part of the GPU that it takes, which so many roles share, its
    profile, and what vLLM makes of the profile."""
    takes, fraction = "vLLM starts on the CPU", None
    if not on_cpu:
        fraction = engine.fraction(roles)
        shared = f", which {roles} roles share" if roles > 1 else ""
        takes = f"vLLM takes {fraction:.2g} of the memory of its GPU{shared}"
    message = f"{takes}; profile {engine.profile}: {describe(resolved)}"
    events.write("engine-starts", message, fraction=fraction, profile=engine.profile, **resolved)


def choose(config: Config, sampling: Sampling, *, device: str, installed: bool, parameters: int = 0) -> Engine:
    """Return the engine that generates and the reason for this choice. Raise ConfigError if the settings demand an
    engine that cannot be used. `installed` says whether vLLM is installed. `parameters` is the size of the model, which
    matters on a CPU."""
    wanted = config.engine.name
    against = ""
    if not installed:
        against = "vLLM is not installed here (docs/gpus.md)"
    elif device == "cuda" and lacks_adapter_kernels(config):
        against = (
            "vLLM's kernels for adapters compute only in 16 bits on a GPU, but model.dtype is 'float32': "
            "model.dtype=bfloat16 model.publish_dtype=bfloat16 lets vLLM serve them"
        )
    elif sampling.lowest < LEAST_TEMPERATURE:
        against = f"vLLM samples at temperatures of at least {LEAST_TEMPERATURE}, but {sampling.lowest:g} is needed"
    elif sampling.highest > MOST_TEMPERATURE:
        against = f"vLLM samples at temperatures of at most {MOST_TEMPERATURE}, but {sampling.highest:g} is needed"
    elif sampling.cut and sampling.reads_logps and not sampling.at_one:
        against = (
            "except at temperature 1, vLLM returns log-probabilities only after top-p has cut the distribution, but "
            f"those from before are needed with {sampling.cut}"
        )
    if wanted == "vllm" and against:
        raise ConfigError(f"engine.name: {against}, got 'vllm'")
    quantization = config.engine.quantization if isinstance(config.engine, VLLMEngine) else None
    if quantization and device in ("cpu", "mps"):
        raise ConfigError(
            f"engine.quantization needs an NVIDIA GPU, and this engine would run on {device}, got {quantization!r}"
        )
    if wanted != "auto":
        return Engine(wanted, "engine.name says so")
    if device == "mps":
        against = against or "vLLM does not run on Apple's GPUs"
    if device == "cpu" and parameters < LEAST_PARAMETERS:
        against = against or "on a CPU vLLM is not faster with small models, and takes longer to start"
    if against and quantization:
        raise ConfigError(f"engine.quantization: only vLLM can round weights, but {against}, got {quantization!r}")
    if against and config.engine.gpus > 1:
        raise ConfigError(
            f"engine.tensor_parallel: only vLLM can spread a model over several GPUs, but {against}, got "
            f"{config.engine.gpus}"
        )
    if against:
        return Engine("transformers", against)
    return Engine("vllm", "it is installed, and " + ("the model is large" if device == "cpu" else "there is a GPU"))


def lacks_adapter_kernels(config: Config) -> bool:
    """True if vLLM cannot serve the versions of a run on a GPU, because they are adapters in float32."""
    return bool(config.model.lora_rank) and config.model.publish_dtype == "float32"


def search_sampling(config: Config) -> Sampling:
    search, cut = config.search, ""
    temperatures = (search.temperature, *(search.explored_temperatures if search.explore_share else ()))
    if search.top_p < 1:
        cut = f"search.top_p={search.top_p:g}"
    elif search.explore_share and search.explore_top_p < 1:
        cut = f"search.explore_top_p={search.explore_top_p:g}"
    at_one = search.temperature == 1 and not search.explore_share
    return Sampling(min(temperatures), max(temperatures), at_one, cut)


def evaluation_sampling(config: Config, *, reads_logps: bool) -> Sampling:
    temperature, top_p = config.evaluation_temperature, config.evaluation_top_p
    cut = f"evaluation.top_p={top_p:g}" if top_p < 1 else ""
    return Sampling(temperature, temperature, temperature == 1, cut, reads_logps)
