"""What can be told of a model from its files, before any of its weights is read: whether it can be a policy.

Imports no torch, so that whoever starts a run can look.
"""

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from tba.errors import ConfigError
from tba.models.file_checks import INDEX, read_object, weight_names, why_damaged

_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt",
)  # fmt: skip
_HEAD = 8  # bytes for the length of the head of a file of safetensors
_POINTER = b"version https://git-lfs"  # how what git has of a large file begins that it did not fetch
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OTHER_ENDS = (
    "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
)  # fmt: skip


def check_folder(setting: str, folder: Path, *, longest: int) -> None:
    """ConfigError if a Hugging Face folder, which this setting names, holds no policy of a run whose prompts and
    responses have at most so many tokens together. What passes may still not load."""
    if fault := why_damaged(folder):
        raise _no_policy(setting, folder, fault)
    config = read_object(folder / "config.json") if (folder / "config.json").exists() else {}
    fault = why_no_policy(config) if config else "no config.json that can be read"
    files = weight_files(folder)
    fault = fault or next((f"{it.name} {why}" for it in files if (why := why_unreadable(it))), "")
    if not files:
        pickled = sorted(it.name for kind in _PICKLED for it in folder.glob(kind))
        fault = fault or "no weights (*.safetensors)" + (
            f", only {pickled[0]}, which is pickled and could run any code: save it as safetensors" if pickled else ""
        )
    if not any((folder / name).exists() for name in _TOKENIZER) and not any(folder.glob("*.tiktoken")):
        fault = fault or "no tokenizer"
    if fault:
        raise _no_policy(setting, folder, fault)
    check_length(config, longest)


def _no_policy(setting: str, folder: Path, fault: str) -> ConfigError:
    return ConfigError(f"{setting}: {str(folder)!r} holds no policy that can be trained: {fault}")


def why_no_policy(config: Mapping[str, Any]) -> str:
    """What a model's config.json says that a policy must not be; empty if nothing."""
    kind, architectures = config.get("model_type", "unknown"), _names(config.get("architectures"))
    if config.get("is_encoder_decoder"):
        return f"{kind} has an encoder and a decoder, and does not continue its prompt"
    if other := next((it for it in architectures if it.endswith(_OTHER_ENDS)), None):
        return f"a {other} is no causal language model"
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else "unknown"
        return f"its weights are quantised ({method}); save them as float32 or bfloat16"
    return ""


def weight_files(folder: Path) -> list[Path]:
    """Those that transformers reads, whether they are there or not: a folder may have the same weights once more in
    another layout. Where neither of its names is there, all that might be meant."""
    whole, index = folder / "model.safetensors", folder / INDEX
    if whole.exists() or not index.exists():
        return [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
    try:
        return sorted(folder / name for name in weight_names(index.read_bytes()))
    except ValueError:
        return sorted(folder.glob("*.safetensors"))


def why_unreadable(path: Path) -> str:
    """What is wrong with a file of safetensors, by its head and its length; empty if nothing."""
    if not path.exists():
        return f"is not there, though {INDEX} names it"
    if not path.is_file():
        return "is no file"
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            return "is a pointer of Git LFS: `git lfs pull` fetches the file itself"
    try:
        ends = [it["data_offsets"][1] for it in _head_of(path).values()]
    except (ValueError, KeyError, TypeError, AttributeError):
        return "is no file of safetensors"
    size, there = _data_of(path) + max(ends, default=0), path.stat().st_size
    return f"is not whole: it has {there:,} bytes of {size:,}" if there < size else ""


def sizes_of(path: Path) -> dict[str, int]:
    """How many numbers each tensor in a file of safetensors has; ValueError if it is none."""
    return {name: prod(it["shape"]) for name, it in _head_of(path).items()}


def _head_of(path: Path) -> dict[str, Any]:
    """What a file of safetensors says of each of its tensors."""
    with path.open("rb") as file:
        file.seek(_HEAD)
        length = _data_of(path) - _HEAD
        if length > path.stat().st_size:
            raise ValueError(f"{path} has no head of safetensors")
        try:
            head = json.loads(file.read(length))
        except RecursionError:
            raise ValueError(f"{path} has a head that is nested too deeply") from None
    return {name: it for name, it in head.items() if name != "__metadata__"}


def _data_of(path: Path) -> int:
    """Where its tensors begin."""
    with path.open("rb") as file:
        return _HEAD + int.from_bytes(file.read(_HEAD), "little")


def check_length(config: Mapping[str, Any], longest: int) -> None:
    """ConfigError if a model cannot read so many tokens, or what it makes of a shorter row depends on whether there is
    one of so many beside it."""
    text = config.get("text_config")
    places = [it for it in (text, config) if isinstance(it, Mapping)]
    names = ("max_position_embeddings", "n_positions")
    found = [it[name] for it in places for name in names if _is_length(it.get(name))]
    if found and longest > found[0]:
        raise ConfigError(
            f"search.max_prompt_tokens + search.max_response_tokens must be <= {found[0]}, the length that the policy "
            f"can read, got {longest}"
        )
    short = min(filter(None, map(_short_rows, places)), default=longest)
    if longest > short:
        raise ConfigError(
            f"search.max_prompt_tokens + search.max_response_tokens must be <= {short}: the policy reads a longer row, "
            f"and all rows beside it, with other factors (longrope), got {longest}"
        )


def _short_rows(config: Mapping[str, Any]) -> int | None:
    """Tokens of the longest row that is read with short factors, where there are others for longer ones."""
    given = [it for name in ("rope_parameters", "rope_scaling") if isinstance(it := config.get(name), Mapping)]
    given += [it for of_kinds in given for it in of_kinds.values() if isinstance(it, Mapping)]
    for it in given:
        is_longrope = it.get("rope_type", it.get("type")) in ("longrope", "su")
        if is_longrope and it.get("short_factor") != it.get("long_factor"):
            name = "original_max_position_embeddings"
            return next((place[name] for place in (config, it) if _is_length(place.get(name))), None)
    return None


def _is_length(value: Any) -> bool:
    """Whether it is a number of tokens: of another value transformers says what is wrong with it."""
    return type(value) is int and value > 0


def _names(value: Any) -> list[str]:
    return [it for it in value if isinstance(it, str)] if isinstance(value, list | tuple) else []
