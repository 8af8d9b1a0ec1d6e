"""Models of transformers with their tokenizers, from Hugging Face folders or the hub; safetensors only."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download, try_to_load_from_cache
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from tba.errors import ConfigError, Damaged, RunFailed, TBAError
from tba.models.file_checks import why_damaged
from tba.models.folder import why_no_policy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def load(
    kind: Any,
    setting: str,
    path: str | Path,
    *,
    tokenizer_path: str | Path | None = None,
    dtype: str = "float32",
    device: str = "auto",
    device_setting: str,
    revision: str = "main",
    trust_remote_code: bool = False,
    may_lack: tuple[str, ...] = (),
    trains: bool = False,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """As this auto class of transformers, from a folder or a hub name (`revision` is for the latter), ready to be
    asked; the tokenizer from another where that is given. All its weights must be there, but for those whose names
    begin with what it `may_lack`. A model that `trains` must be one that can be a policy.

    Damaged if the folder is there and does not load, ConfigError if it is neither a folder nor a repository with
    such a model (`setting` named it), or if there is no such device, RunFailed if the hub could not be asked, so that
    another try may succeed.
    """
    place = resolve_device(device, setting=device_setting)
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    weights = {"dtype": resolve_dtype(dtype), "use_safetensors": True, "output_loading_info": True}
    try:
        _check_files(path, tokenizer_path)
        config = AutoConfig.from_pretrained(path, **options)
        if trains and (why := why_no_policy(config.to_dict())):
            raise ValueError(why)
        weights |= attention_of(config)
        tokenizer = _tokenizer(tokenizer_path or path, **options)
        model, found = kind.from_pretrained(path, ignore_mismatched_sizes=True, **weights, **options)
        for name, stored, wanted in sorted(found["mismatched_keys"]):  # transformers' own error does not name them
            raise ValueError(f"{name} has the shape {tuple(stored)}, and config.json makes it {tuple(wanted)}")
        missing = sorted(name for name in found["missing_keys"] if not name.startswith(may_lack))
        if missing:  # transformers fills them with random numbers
            raise ValueError(f"for {kind.__name__} it has no {', '.join(missing[:3])}")
        if getattr(model, "_hf_peft_config_loaded", False):
            raise ValueError("it is an adapter of another model: merge the two first")
        _check_files(*(_cached_folder(it, revision) for it in (path, tokenizer_path)))
    except (TBAError, MemoryError):
        raise
    except Exception as error:  # of a file that is damaged whatever its reader comes upon
        raise _cannot_load(setting, path, error, revision=revision) from error
    return model.to(place).eval(), tokenizer


def load_frozen(
    kind: Any, setting: str, path: str | Path, *, device_setting: str = "", **options: Any
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model that a task asks, which is never trained here. As `load`, but what does not load is a bad setting, as
    is `<setting>_device` where there is no such device; and its tokenizer can pad."""
    try:
        model, tokenizer = load(kind, setting, path, device_setting=device_setting or f"{setting}_device", **options)
    except Damaged as error:
        raise ConfigError(f"{setting}: {error}") from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return model, tokenizer


def local_folder(setting: str, path: str | Path, *, revision: str = "main") -> Path:
    """Itself, or what a name of the hub stands for, as `load` would read it; with its errors."""
    if Path(path).is_dir():
        return Path(path)
    try:
        wanted = ["*.json", "*.safetensors", "*.txt", "*.model", "*.tiktoken", "*.jinja", "*.py"]
        return Path(snapshot_download(str(path), revision=revision, allow_patterns=wanted))
    except (OSError, ValueError) as error:
        raise _cannot_load(setting, path, error) from error


def resolve_device(device: str, *, setting: str = "model.device") -> torch.device:
    """`auto` is the GPU where there is one, else the CPU; anything else is a device's name."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"{setting}: no such kind of device, got {device!r}") from None
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"{setting}: this machine has {torch.cuda.device_count()} GPUs, got {device!r}")
    return place


def computing(model: Any, dtype: str) -> torch.autocast:
    """In here a model with weights in float32 multiplies matrices in this type, or in that which `auto` stands for.
    Only for forward passes: backward takes of each step the type that forward took."""
    lowers = model.dtype == torch.float32 and is_lowered(dtype, model.device)
    return torch.autocast(model.device.type, torch.bfloat16, enabled=lowers)


def is_lowered(dtype: str, device: torch.device) -> bool:
    """Whether that stands for less than float32."""
    return dtype == "bfloat16" or (dtype == "auto" and device.type != "cpu")


def resolve_dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise ConfigError(f"dtype: one of {', '.join(DTYPES)}, got {name!r}")
    return DTYPES[name]


def _tokenizer(path: str | Path, **options: Any) -> PreTrainedTokenizerBase:
    try:
        return AutoTokenizer.from_pretrained(path, **options)
    except (OSError, ValueError, RuntimeError, ImportError, MemoryError):
        raise
    except Exception as error:  # whatever is in a file that is none: tokenizers has no errors of its own
        raise ValueError(f"its tokenizer cannot be read: {error!r}") from error


def _check_files(*folders: str | Path | None) -> None:
    """ValueError, naming the file, if one in these folders is damaged; names of the hub are passed over."""
    for folder in folders:
        if folder is not None and Path(folder).is_dir() and (fault := why_damaged(Path(folder))):
            raise ValueError(f"{folder}/{fault}")


def _cached_folder(name: str | Path | None, revision: str) -> Path | None:
    """Where the hub's cache has a model; None if it has none, or for a folder, which is looked at already."""
    if name is None or Path(name).is_dir():
        return None
    try:
        found = try_to_load_from_cache(str(name), "config.json", revision=revision)
    except ValueError:  # no name of the hub
        return None
    return Path(found).parent if isinstance(found, str) else None


def attention_of(config: Any) -> dict[str, str]:
    """What transformers is told to make the model with: where attention is capped the plain implementation, as others
    leave that out without a word."""
    caps = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None)
    return {"attn_implementation": "eager"} if caps else {}


def _cannot_load(setting: str, path: str | Path, error: Exception, *, revision: str = "main") -> TBAError:
    """Damaged, ConfigError or RunFailed, as `load` says."""
    tells = isinstance(error, OSError | ValueError | RuntimeError | ImportError | SafetensorError)
    text = str(error) if tells and str(error) else f"{error!r:.300}"
    known, _, _ = text.partition("\nModel type should be one of")  # hundreds
    if (cached := _cached_folder(path, revision)) and (fault := why_damaged(cached)):
        known = f"{fault}; remove {cached}, so that it is fetched anew"
    what = f"cannot load a model from {str(path)!r}: {known}"
    if Path(path).is_dir():
        return Damaged(what)
    if any(_is_transport(cause) for cause in _causes(error)):
        return RunFailed(what)
    return ConfigError(f"{setting}: {what}")


def _is_transport(error: BaseException) -> bool:
    """The hub, or the way there; what it answers about a model itself, such as that there is none, is not meant."""
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in (408, 429) or error.response.status_code >= 500
    return isinstance(error, LocalEntryNotFoundError | ConnectionError | TimeoutError)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def end_tokens(config: GenerationConfig | None, tokenizer: Any) -> frozenset[int]:
    """What ends a response: the model's own end tokens, which may be several, and the tokenizer's."""
    configured = config.eos_token_id if config else None
    ends = configured if isinstance(configured, list) else [configured]
    return frozenset(token for token in [*ends, tokenizer.eos_token_id] if isinstance(token, int))
