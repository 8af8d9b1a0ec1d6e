"""Settings of the engines that generate responses."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Discriminator, Field, JsonValue, Tag

from tba.settings import Positive, settings


@settings
class Engine:
    """The engine that generates responses, for searchers and the evaluator."""

    name: str
    """Name of the engine. `auto` uses vLLM if it is installed and there is a GPU, or the policy has at least 50 million
    parameters; otherwise transformers. The path of a class, such as `package.module:Class`, uses a generator of your
    own."""
    in_flight: Literal["finish", "update"] = "finish"
    """What happens to unfinished responses when a new version appears. `finish`: the round is finished with the version
    that began it. `update`: the engine loads the new version at once, and unfinished responses go on with its weights.
    With `update` and adapters, vLLM serves two versions at once: a response ends with the version that began it, and
    new responses use the newest version. A third version waits until one of the two is no longer used."""

    @property
    def gpus(self) -> int:
        """The number of GPUs that one engine is spread over."""
        return 1


@settings
class VLLMEngine(Engine):
    """vLLM, or with `auto` the choice between vLLM and transformers."""

    name: Literal["auto", "vllm"] = "auto"
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of the memory of a GPU that vLLM uses. Higher values let more responses be generated at once; the
    reference model, and models that a task rewards with, need the rest. Unset, it is 0.6 divided by the number of roles
    that share the GPU."""
    cache_gigabytes: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Gigabytes for the key-value cache of vLLM. More cache lets more responses be generated at once. Unset, it is what
    the memory fraction leaves on a GPU, and 1 on a CPU."""
    tensor_parallel: Positive = 1
    """Number of GPUs that one vLLM engine is spread over."""
    profile: Literal["safe", "default", "fast"] = "default"
    """Optimisations of vLLM. `safe`: none, so that an engine starts sooner and little can break; use it for a first run
    on a GPU. `default`: what vLLM chooses by itself, usually a compiled model, CUDA graphs, the second of its model
    runners and asynchronous scheduling. `fast`: in addition, more tokens of prompts in one step, CUDA graphs also for
    more than 512 responses, and an error if scheduling cannot be asynchronous. On a CPU vLLM neither
    compiles nor schedules ahead, with any profile."""
    quantization: Literal["fp8"] | None = None
    """Number format in which vLLM multiplies the weights of linear layers. `fp8` rounds these weights of each version
    to 8 bits: generation needs less memory and is faster, and its log-probabilities differ more from the trainer's
    (`greedy_mismatch` in the view `evaluations`). It needs an NVIDIA GPU and `model.publish_dtype=bfloat16`. Unset, the
    weights stay in `model.publish_dtype`."""

    @property
    def gpus(self) -> int:
        return self.tensor_parallel

    def fraction(self, roles: int = 1) -> float:
        """Return the fraction of a GPU's memory that one engine takes if `roles` roles share the GPU. Each role, also
        the trainer, has an equal part of the GPU. Unless `memory_fraction` is set, an engine takes 0.6 of its part."""
        return self.memory_fraction or 0.6 / roles


@settings
class TransformersEngine(Engine):
    """The transformers library."""

    name: Literal["transformers"] = "transformers"


@settings
class CustomEngine(Engine):
    """A generator that is named by the path of its class. docs/extending.md describes the class."""

    name: Annotated[str, Field(pattern=r"^\w+(\.\w+)*:\w+$")]
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Settings for the class in `engine.name`, as a mapping from names to values. The class defines the
    names."""


ENGINES: Mapping[str, type[Engine]] = {"auto": VLLMEngine, "vllm": VLLMEngine, "transformers": TransformersEngine}


def _tag(value: Any) -> str:
    name = value.get("name", "auto") if isinstance(value, Mapping) else getattr(value, "name", "")
    return "custom" if ":" in str(name) else str(name)


if TYPE_CHECKING:
    AnyEngine = Engine
else:
    AnyEngine = Annotated[
        Annotated[VLLMEngine, Tag("auto")]
        | Annotated[VLLMEngine, Tag("vllm")]
        | Annotated[TransformersEngine, Tag("transformers")]
        | Annotated[CustomEngine, Tag("custom")],
        Discriminator(_tag),
    ]
    """The settings of any engine. `name` selects the class."""
