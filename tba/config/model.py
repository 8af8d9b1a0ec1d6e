"""Settings of the task and the model."""

from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from tba.settings import Count, settings


@settings
class TaskConfig:
    """The prompts, and how responses are rewarded."""

    name: str = "quickstart"
    """The task: a built-in name, the name of an entry point `tba.tasks` of an installed package, or the path of a
    class, such as `package.module:Class`."""
    train: str = ""
    """Training prompts: JSON lines or Parquet at a path or URL. The last part of the path may contain a `*` to match
    several files. Empty uses the data of the task itself."""
    test: str = ""
    """Evaluation prompts, in the same form as `train`."""
    rule: str = ""
    """Name of the rule that grades a response, for tasks with several rules. Empty uses the default of the task."""
    template: str = ""
    """Name of the wording of the prompt, for tasks with several wordings. Empty uses the default of the task."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Further settings that the task defines under names of its own."""


@settings
class ModelConfig:
    """The language model that is trained. Before the first step it is also the reference."""

    path: str = ""
    """The model to start from: a folder, an `s3://` URL, a name on the Hugging Face hub, or a GGUF file. A folder or
    GGUF file may also lie in an installed package: `package:NAME/FOLDER`, `package:NAME/FILE.gguf`. If it is empty, the
    task makes a small base model; of the built-in tasks only `quickstart` can."""
    revision: str = "main"
    """Branch, tag or commit of a model on the hub."""
    trust_remote_code: bool = False
    """Whether to run Python code that comes with the model. Every role then runs this code: switch it on only for
    models that you trust."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights and the optimizer state in the trainer. bfloat16 halves the memory and rounds small
    updates away."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of published versions, which the searchers generate with. bfloat16 halves the size of a version."""
    device: str = "auto"
    """Device of every role: `auto`, `cpu` or `cuda`. `auto` uses a GPU if there is one. The supervisor divides the
    GPUs among the roles, and each role sees only its own, so `cuda:0` is the first GPU of that role."""
    gpu_shifts: bool = False
    """Whether roles use their GPU one after the other. A role that waits for its next shift keeps its weights in main
    memory. So a GPU needs room for only one role at a time, and roles no longer work at the same time."""
    threads: Count | Literal["shared"] = 1
    """CPU threads of each role. `shared` divides the cores of the machine among the ranks of the trainer and the
    searchers, at least one each; use it if all roles compute on one CPU. The last digits of a step depend on the number
    of threads. 0 leaves the number to torch."""
    lora_rank: Annotated[int, Field(ge=0, le=512)] = 0
    """Rank of the low-rank adapters (LoRA) that are trained and published in place of the weights. A higher rank can
    learn more and takes more memory. 0 trains all weights."""
    lora_alpha: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """Scale of the adapters: their output is multiplied by lora_alpha / lora_rank. Unset, lora_alpha is twice
    lora_rank."""
    lora_targets: Annotated[str, Field(min_length=1)] = "all-linear"
    """Layers that get an adapter: `all-linear` means every linear layer except the output layer; otherwise names
    separated by commas, such as `q_proj,v_proj`."""

    @model_validator(mode="after")
    def _settings_of_lora_apply(self) -> Self:
        for name in ("lora_alpha", "lora_targets"):
            value = getattr(self, name)
            if not self.lora_rank and value != getattr(type(self), name):
                raise ValueError(f"model.{name} does not apply where model.lora_rank is 0, got {value!r}")
        if self.lora_rank and self.publish_dtype != self.dtype:
            raise ValueError(
                f"model.publish_dtype must be model.dtype ({self.dtype!r}) where model.lora_rank is set, got "
                f"{self.publish_dtype!r}: adapters are published in the type in which they are trained, and all roles "
                "share one base model"
            )
        return self

    @property
    def peft_alpha(self) -> float:
        """`lora_alpha` as peft expects it, with the default filled in."""
        return 2.0 * self.lora_rank if self.lora_alpha is None else self.lora_alpha
