"""What generates responses on this machine: vLLM where it is installed and suits, transformers elsewhere. Imports
neither before one is chosen."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple

from flows.supervision.gpus import engine_start
from storage.runs.events import Events
from tba.config import Config, CustomEngine, VLLMEngine
from tba.errors import ConfigError
from tba.interfaces import Generator
from tba.runtime.loading import load_class

if TYPE_CHECKING:
    from tba.models.adapters import Adapter

LEAST_TEMPERATURE = 0.01  # vLLM takes this for any that is lower, but for 0
MOST_TEMPERATURE = 2  # it refuses any that is higher


class Engine(NamedTuple):
    name: str
    why: str


class Sampling(NamedTuple):
    """What a role samples with, as far as it decides whether vLLM can serve it."""

    lowest: float  # temperature of what is sampled
    highest: float
    at_one: bool  # always at temperature 1
    cut: str  # the setting by which only the most likely tokens are sampled; empty if none does
    reads_logps: bool = True  # of what it samples


def open_generator(config: Config, events: Events, sampling: Sampling, adapter: "Adapter | None" = None) -> Generator:
    """Return the generator that the settings choose, before it has adopted a version. `adapter` is given if versions
    are adapters."""
    from tba.models.pretrained import resolve_device

    device = resolve_device(config.model.device).type
    engine = choose(config, sampling, device=device, installed=find_spec("vllm") is not None)
    events.write("engine-chosen", f"responses come from {engine.name}: {engine.why}", engine=engine.name)
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
            starting=(lambda: nullcontext(1)) if device == "cpu" else partial(_starting, config.engine, events),
        )
    from tba.generation.transformers_generator import TransformersGenerator

    return TransformersGenerator(**common, device=config.model.device)


@contextmanager
def _starting(engine: VLLMEngine, events: Events) -> Iterator[int]:
    with engine_start() as roles:
        share = engine.fraction(roles)
        shared = f", which {roles} roles share" if roles > 1 else ""
        events.write("engine-starts", f"vLLM takes {share:.2g} of the memory of its GPU{shared}", fraction=share)
        yield roles


def choose(config: Config, sampling: Sampling, *, device: str, installed: bool) -> Engine:
    """ConfigError if what the settings want is not to be had."""
    wanted = config.engine.name
    against = ""
    if not installed:
        against = "vLLM is not installed here (docs/gpus.md)"
    elif sampling.lowest < LEAST_TEMPERATURE:
        against = f"vLLM samples at temperatures of at least {LEAST_TEMPERATURE}, and here it is {sampling.lowest:g}"
    elif sampling.highest > MOST_TEMPERATURE:
        against = f"vLLM samples at temperatures of at most {MOST_TEMPERATURE}, and here it can be {sampling.highest:g}"
    elif sampling.cut and sampling.reads_logps and not sampling.at_one:
        against = (
            "only at temperature 1 does vLLM tell log-probabilities from before top_p cuts them, and here "
            f"{sampling.cut}"
        )
    if wanted == "vllm" and against:
        raise ConfigError(f"engine.name: {against}, got 'vllm'")
    if wanted != "auto":
        return Engine(wanted, "engine.name says so")
    if device == "mps":
        against = against or "vLLM does not run on Apple's GPUs"
    if device == "cpu":
        against = against or "on a CPU vLLM is not faster with small models, and starts later"
    if against and config.engine.gpus > 1:
        raise ConfigError(
            f"engine.tensor_parallel: only vLLM spreads a model over GPUs, and {against}, got {config.engine.gpus}"
        )
    return Engine("transformers", against) if against else Engine("vllm", "it is installed, and there is a GPU")


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
