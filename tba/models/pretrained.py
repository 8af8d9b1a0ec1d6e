"""Load transformers models and their tokenizers from Hugging Face folders or from the hub. Weights are loaded from
safetensors only."""

from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from typing import Any, cast

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.pytorch_utils import Conv1D

from tba.errors import ConfigError, Damaged, RunFailed, TBAError, first_line
from tba.models.file_checks import why_damaged
from tba.models.folder import why_no_policy
from tba.runtime import compute_dtype, nvidia

LOADING = Lock()
"""Held while transformers loads a model. It replaces methods of its classes meanwhile: if two threads load at once, a
replaced method can stay, and all later loads of models with tied weights fail."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load(
    kind: Any,
    setting: str,
    path: str | Path,
    *,
    tokenizer_path: str | Path | None = None,
    dtype: str = "float32",
    dtype_setting: str = "model.dtype",
    device: str = "auto",
    device_setting: str,
    revision: str = "main",
    trust_remote_code: bool = False,
    may_lack: tuple[str, ...] = (),
    trains: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model by the auto class `kind` of transformers, from a folder or a hub name, in evaluation mode.

    `revision` is used for hub names. The tokenizer is loaded from `tokenizer_path` if it is given. All weights of the
    model must be stored, except those whose names begin with a prefix in `may_lack`. If `trains` is true, it must be
    possible to train the model as a policy.

    Raise Damaged if the folder exists but does not load. Raise ConfigError, naming `setting`, if the path is neither a
    folder nor a repository with such a model. Raise ConfigError, naming `dtype_setting` or `device_setting`, if there
    is no such type or device. Raise RunFailed if the hub could not be asked, so that another try may succeed.
    """
    place = resolve_device(device, setting=device_setting)
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    weights = {
        "dtype": resolve_dtype(dtype, setting=dtype_setting),
        "use_safetensors": True,
        "output_loading_info": True,
    }
    try:
        _check_files(path, tokenizer_path)
        config = AutoConfig.from_pretrained(path, **options)
        if trains and (why := why_no_policy(config.to_dict())):
            raise ValueError(why)
        weights |= attention_of(config)
        tokenizer = _tokenizer(tokenizer_path or path, **options)
        with LOADING:
            model, found = kind.from_pretrained(path, ignore_mismatched_sizes=True, **weights, **options)
        for name, stored, wanted in sorted(found["mismatched_keys"]):  # transformers' error lacks the names
            raise ValueError(f"{name} has the shape {tuple(stored)}, but config.json says {tuple(wanted)}")
        missing = sorted(name for name in found["missing_keys"] if not name.startswith(may_lack))
        if missing:  # transformers fills them with random numbers
            raise ValueError(f"for {kind.__name__} it has no {', '.join(missing[:3])}")
        if getattr(model, "_hf_peft_config_loaded", False):
            raise ValueError("it is an adapter of another model: merge the two first")
        _check_files(*(_cached_folder(it, revision) for it in (path, tokenizer_path)))
    except (TBAError, MemoryError):
        raise
    except Exception as error:  # the reader of a damaged file may raise anything
        raise _cannot_load(setting, path, error, revision=revision) from error
    return model.to(place).eval(), tokenizer


def load_frozen(
    kind: Any, setting: str, path: str | Path, *, device_setting: str = "", **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a model that a task uses. Such a model is never trained here. This function works like `load`, with four
    differences. A damaged model is a ConfigError. The setting of the dtype is `task.options.dtype`. The setting of the
    device is `<setting>_device` unless `device_setting` is given. The tokenizer gets a padding token if it has none."""
    try:
        device_setting = device_setting or f"{setting}_device"
        model, tokenizer = load(
            kind, setting, path, dtype_setting="task.options.dtype", device_setting=device_setting, **options
        )
    except Damaged as error:
        raise ConfigError(f"{setting}: {error}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def local_folder(setting: str, path: str | Path, *, revision: str = "main") -> Path:
    """Return the path itself if it is a folder. Otherwise download the files of this hub name that `load` would read,
    and return their folder. Raises the errors of `load`."""
    if Path(path).is_dir():
        return Path(path)
    try:
        wanted = ["*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py"]
        return Path(snapshot_download(str(path), revision=revision, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        raise _cannot_load(setting, path, error) from error


def resolve_device(device: str, *, setting: str = "model.device") -> torch.device:
    """Return the device with this name. `auto` is the GPU if there is one, and otherwise the CPU. Raise ConfigError for
    `auto` if there are NVIDIA GPUs that torch cannot use."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        nvidia.refuse_cpu(setting, torch.version.cuda, _why_no_gpu())
        return torch.device("cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"{setting}: no such kind of device, got {device!r}") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"{setting}: this process may use {torch.cuda.device_count()} GPUs, got {device!r}")
    return place


def _why_no_gpu() -> str:
    """Return the error of torch when it looks for a GPU."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch {torch.__version__} finds none: {first_line(error)}"
    return f"torch {torch.__version__} finds none"


def computing(model: Any, dtype: str) -> torch.autocast:
    """Return a context in which a model with float32 weights multiplies matrices in bfloat16, if `dtype`, a value of
    `training.compute_dtype`, says so. Use it for forward passes only: the backward pass uses the type that each
    operation had in the forward pass."""
    return torch.autocast(model.device.type, torch.bfloat16, enabled=is_lowered(model, dtype, model.device))


def is_lowered(model: Any, dtype: str, device: torch.device) -> bool:
    """True if a model has float32 weights and multiplies matrices in bfloat16 on this device."""
    if model.dtype != torch.float32:
        return False
    parameters = sum(it.numel() for it in model.parameters())
    return compute_dtype.choose(dtype, device=device.type, parameters=parameters).name == "bfloat16"


def lower_products(model: nn.Module, dtype: str) -> None:
    """Convert the weight matrices of linear layers to bfloat16, if `computing` would convert them for each product.
    The products stay the same, the matrices take half of the memory, and the model can no longer be trained. All other
    parameters stay in float32, as does an output layer that shares its weights with the embeddings."""
    if not is_lowered(model, dtype, cast(Any, model).device):
        return
    first = next(model.parameters())  # transformers takes its format as that of the model
    untouched = (first, cast(Any, model).get_input_embeddings().weight)
    for layer in cast(Any, model).modules():
        if type(layer) in (nn.Linear, Conv1D) and not any(layer.weight is it for it in untouched):
            layer.weight = nn.Parameter(layer.weight.detach().to(torch.bfloat16), requires_grad=False)


def resolve_dtype(name: str, *, setting: str = "model.dtype") -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"{setting} must be one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def _tokenizer(path: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError, RuntimeError, ImportError, MemoryError):
        raise
    except Exception as error:  # tokenizers raises plain Exceptions for a bad file
        raise ValueError(f"its tokenizer cannot be read: {error!r}") from error


def _check_files(*folders: str | Path | None) -> None:
    """Raise ValueError, naming the file, if a file in these folders is damaged. Hub names are ignored."""
    for folder in folders:
        if folder is not None and Path(folder).is_dir() and (fault := why_damaged(Path(folder))):
            raise ValueError(f"{folder}/{fault}")


def _cached_folder(name: str | Path | None, revision: str) -> Path | None:
    """Return the folder of a model in the hub's cache. Return None if the model is not cached, or if `name` is itself a
    folder, which has been checked already."""
    if name is None or Path(name).is_dir():
        return None
    try:
        found = try_to_load_from_cache(str(name), "config.json", revision=revision)
    except ValueError:  # not a valid hub name
        return None
    return Path(found).parent if isinstance(found, str) else None


def attention_of(config: Any) -> dict[str, str]:
    """Return the options that select the attention of a model when transformers creates it. A model that caps its
    attention logits needs the eager implementation, because the others silently ignore the cap."""
    caps = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return {"attn_implementation": "eager"} if caps else {}


def _cannot_load(setting: str, path: str | Path, error: Exception, *, revision: str = "main") -> TBAError:
    """Return the error to raise for a model that cannot be loaded: Damaged, ConfigError or RunFailed, as described in
    `load`."""
    tells = isinstance(error, OSError | ValueError | RuntimeError | ImportError | SafetensorError)
    text = str(error) if tells and str(error) else f"{error!r:.300}"
    known, _, _ = text.partition("\nModel type should be one of")  # a list of hundreds of names follows
    if (cached := _cached_folder(path, revision)) and (fault := why_damaged(cached)):
        known = f"{fault}; remove {cached}, so that the model is downloaded again"
    what = f"cannot load a model from {str(path)!r}: {known}"
    if Path(path).is_dir():
        return Damaged(what)
    if any(_is_transport(cause) for cause in _causes(error)):
        return RunFailed(what)
    return ConfigError(f"{setting}: {what}")


def _is_transport(error: BaseException) -> bool:
    """True if an error comes from the network, or from a failure of the hub. False if the hub answered something about
    the model, such as that it does not exist."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, LocalEntryNotFoundError | ConnectionError | TimeoutError)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def end_tokens(config: GenerationConfig | None, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a response: all end tokens of the model, and the end token of the tokenizer."""
    configured = config.eos_token_id if config else None
    ends = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in [*ends, tokenizer.eos_token_id] if isinstance(token, int))
