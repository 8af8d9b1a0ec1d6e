"""What generates responses on this machine: vLLM where it is installed and suits, transformers elsewhere. Imports
neither before one is chosen."""

from importlib.util import find_spec
from typing import Any, NamedTuple

from storage.events import Events
from tba.config import Config
from tba.errors import ConfigError
from tba.interfaces import Generator

LEAST_TEMPERATURE = 0.01  # vLLM takes this for any that is lower, but for 0


class Engine(NamedTuple):
    name: str
    why: str


def open_generator(config: Config, events: Events) -> Generator:
    """The one to use, before it has adopted anything."""
    from tba.pretrained import resolve_device

    device = resolve_device(config.model.device).type
    engine = choose(config, device=device, installed=find_spec("vllm") is not None)
    events.write("engine-chosen", f"responses come from {engine.name}: {engine.why}", engine=engine.name)
    common: dict[str, Any] = {
        "dtype": config.model.publish_dtype,
        "batch_responses": config.search.batch_responses,
        "max_response_tokens": config.search.max_response_tokens,
        "trust_remote_code": config.model.trust_remote_code,
    }
    if engine.name == "vllm":
        from tba.vllm_generation import VLLMGenerator

        return VLLMGenerator(
            **common,
            on_cpu=device == "cpu",
            max_prompt_tokens=config.search.max_prompt_tokens,
            raw_logps=samples_at_one(config),
            engine=config.engine,
        )
    from tba.generation import TransformersGenerator

    return TransformersGenerator(**common, device=config.model.device)


def choose(config: Config, *, device: str, installed: bool) -> Engine:
    """ConfigError if what the settings want is not to be had."""
    wanted = config.engine.name
    against = ""
    if not installed:
        against = "vLLM is not installed here (docs/gpus.md)"
    elif (lowest := lowest_temperature(config)) < LEAST_TEMPERATURE:
        against = f"vLLM samples at temperatures of at least {LEAST_TEMPERATURE}, and this run at {lowest:g}"
    elif not samples_at_one(config) and cuts(config):
        against = (
            "only at temperature 1 does vLLM tell log-probabilities from before top_p cuts them, and this run samples "
            f"with {cuts(config)}"
        )
    if wanted == "vllm" and against:
        raise ConfigError(f"engine.name: {against}, got 'vllm'")
    if wanted != "auto":
        return Engine(wanted, "engine.name says so")
    if device == "cpu":
        against = against or "on a CPU vLLM is not faster with small models, and starts later"
    return Engine("transformers", against) if against else Engine("vllm", "it is installed, and there is a GPU")


def lowest_temperature(config: Config) -> float:
    """The lowest temperature of all that is sampled."""
    explored = config.search.explore_temperature if config.search.explore_share else None
    return min(config.search.temperature, config.evaluation_temperature, *(explored or ()))


def samples_at_one(config: Config) -> bool:
    """Whether all that is sampled is sampled at temperature 1."""
    return config.search.temperature == config.evaluation_temperature == 1 and not config.search.explore_share


def cuts(config: Config) -> str:
    """The setting by which only the most likely tokens are sampled; empty if none does."""
    search = config.search
    if search.top_p < 1:
        return f"search.top_p={search.top_p:g}"
    if search.explore_share and search.explore_top_p < 1:
        return f"search.explore_top_p={search.explore_top_p:g}"
    if config.evaluation_top_p < 1:
        return f"evaluation.top_p={config.evaluation_top_p:g}"
    return ""
