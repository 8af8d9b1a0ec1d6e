"""Settings of the task, the model, and the engine that generates responses."""

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from tba.config.fields import Count as Count
from tba.config.fields import Positive as Positive
from tba.config.fields import settings as settings


@settings
class TaskConfig:
    """What is asked and how answers are rewarded."""

    name: str = "quickstart"
    """One of ours, the name of an entry point `tba.tasks` of an installed package, or the path of a class, such as
    `package.module:Class`."""
    train: str = ""
    """Rows to learn from: JSON lines or Parquet at a path or URL, whose last part may have a `*` for several files;
    empty takes the task's own."""
    test: str = ""
    """Rows to evaluate on, likewise."""
    rule: str = ""
    """How an answer is read out of a response, where the task has several ways; empty takes its default."""
    template: str = ""
    """Which wording of the prompt, where the task has several; empty takes its default."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Whatever else a task can be told, by names of its own."""


@settings
class ModelConfig:
    """The policy before training; it is also the reference, at first."""

    path: str = ""
    """A folder, an `s3://` URL or a hub name; empty lets the task make its own small base policy."""
    revision: str = "main"
    """Of a model of the hub: a branch, a tag or a commit."""
    trust_remote_code: bool = False
    """Whether a model may bring code of its own, which every role then runs."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of the trainer's weights and optimizer."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Of published versions, which searchers generate with."""
    device: str = "auto"
    """`auto` takes a GPU where there is one."""
    threads: Count = 1
    """CPU threads of each role; 0 leaves them to torch."""
    lora_rank: Annotated[int, Field(ge=0, le=512)] = 0
    """Of adapters that are trained, and published, in place of the weights, which stay as they are; 0 trains those."""
    lora_alpha: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """What an adapter adds is multiplied by lora_alpha / lora_rank; unset, by 2."""
    lora_targets: Annotated[str, Field(min_length=1)] = "all-linear"
    """Layers that have an adapter: `all-linear` is all inside the model; else names with commas between them, such as
    `q_proj,v_proj`."""

    @model_validator(mode="after")
    def _settings_of_lora_apply(self) -> Self:
        for name in ("lora_alpha", "lora_targets"):
            found = getattr(self, name)
            if not self.lora_rank and found != getattr(type(self), name):
                raise ValueError(f"model.{name} does not apply where model.lora_rank is 0, got {found!r}")
        if self.lora_rank and self.publish_dtype != self.dtype:
            raise ValueError(
                f"model.publish_dtype must be model.dtype ({self.dtype!r}) where model.lora_rank is set: adapters are "
                f"published as they are trained, and their base is one for all roles, got {self.publish_dtype!r}"
            )
        return self

    @property
    def peft_alpha(self) -> float:
        """As peft takes it."""
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha


@settings
class EngineConfig:
    """What generates responses, for searchers and the evaluator."""

    name: Literal["auto", "vllm", "transformers"] = "auto"
    """`auto` takes vLLM on a GPU, where it is installed."""
    memory_fraction: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of a GPU's memory that vLLM takes; the reference, and the models by which a task rewards, lie beside it. Unset,
    0.6 divided by the number of roles that share the GPU."""
    cache_gigabytes: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Of vLLM's keys and values; unset, on a GPU what is left of its share, on a CPU 1."""
    tensor_parallel: Positive = 1
    """GPUs that one engine of vLLM is spread over."""
    in_flight: Literal["finish", "update"] = "finish"
    """What becomes of responses in the making when a version appears: a round is finished by the version that began
    it, or the version is adopted at once and they go on with its weights. Of adapters vLLM serves several at once: each
    response ends with the one that it began with, and others begin with the newest."""
    compile: bool = True
    """Whether vLLM, on a GPU, compiles the model and records CUDA graphs: faster steps, and a slower start."""

    @model_validator(mode="after")
    def _settings_of_vllm_apply(self) -> Self:
        for name in ("memory_fraction", "cache_gigabytes", "tensor_parallel", "compile"):
            found = getattr(self, name)
            if self.name == "transformers" and found != getattr(type(self), name):
                raise ValueError(f"engine.{name} does not apply where engine.name is 'transformers', got {found!r}")
        return self

    def fraction(self, roles: int = 1) -> float:
        """Of a GPU's memory that an engine takes where so many roles share it. Each role has an equal part of it, the
        trainer as well as those with an engine, and leaves 0.6 of its part to that: the engines of as many roles take
        no more than 0.6 together."""
        return self.memory_fraction or 0.6 / roles
