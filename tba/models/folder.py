"""Check whether a model can be a policy. The check looks at the model's files, before any weights are read.

This module does not import torch, so that a command that starts a run can use it.
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
_HEAD = 8  # bytes that hold the length of the header of a safetensors file
_POINTER = b"version https://git-lfs"  # start of the text that Git LFS leaves in place of a file it has not fetched
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OTHER_ENDS = (
    "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
)  # fmt: skip


def check_folder(setting: str, folder: Path, *, longest: int) -> None:
    """Raise ConfigError, naming the setting, if a Hugging Face folder holds no policy for a run in which a prompt and
    its response have at most `longest` tokens together. A folder that passes may still fail to load."""
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
    """Return why a model with this config.json cannot be a policy. Return an empty string if the config allows it."""
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
    """Return the weight files that transformers reads: model.safetensors, or else the files that the index names,
    whether these exist or not. Other files may hold the same weights in another layout. If there is neither
    model.safetensors nor a readable index, return all safetensors files."""
    whole, index = folder / "model.safetensors", folder / INDEX
    if whole.exists() or not index.exists():
        return [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
    try:
        return sorted(folder / name for name in weight_names(index.read_bytes()))
    except ValueError:
        return sorted(folder.glob("*.safetensors"))


def why_unreadable(path: Path) -> str:
    """Return what is wrong with the header or the size of a safetensors file. Return an empty string if nothing is."""
    if not path.exists():
        return f"is missing, although {INDEX} names it"
    if not path.is_file():
        return "is no file"
    with path.open("rb") as file:
        if file.read(len(_POINTER)) == _POINTER:
            return "is a pointer of Git LFS: `git lfs pull` fetches the file itself"
    try:
        ends = [it["data_offsets"][1] for it in _head_of(path).values()]
    except (ValueError, KeyError, TypeError, AttributeError):
        return "is not a safetensors file"
    size, there = _data_of(path) + max(ends, default=0), path.stat().st_size
    return f"is incomplete: it has {there:,} bytes of {size:,}" if there < size else ""


def sizes_of(path: Path) -> dict[str, int]:
    """Return the number of elements of each tensor in a safetensors file, by name. Raise ValueError if it is not a
    safetensors file."""
    return {name: prod(it["shape"]) for name, it in _head_of(path).items()}


def tensor_places(path: Path) -> dict[str, tuple[int, int]]:
    """Return where each tensor of a safetensors file begins and ends, in bytes from the start of the file. Raise
    ValueError if it is not a safetensors file."""
    start = _data_of(path)
    places = {name: it["data_offsets"] for name, it in _head_of(path).items()}
    return {name: (start + first, start + end) for name, (first, end) in places.items()}


def _head_of(path: Path) -> dict[str, Any]:
    """Return what the header of a safetensors file says about each tensor."""
    with path.open("rb") as file:
        file.seek(_HEAD)
        length = _data_of(path) - _HEAD
        if length > path.stat().st_size:
            raise ValueError(f"{path} has no header of a safetensors file")
        try:
            head = json.loads(file.read(length))
        except RecursionError:
            raise ValueError(f"{path} has a header that is nested too deeply") from None
    return {name: it for name, it in head.items() if name != "__metadata__"}


def _data_of(path: Path) -> int:
    """Return the offset in bytes at which the tensors of a safetensors file begin."""
    with path.open("rb") as file:
        return _HEAD + int.from_bytes(file.read(_HEAD), "little")


def check_length(config: Mapping[str, Any], longest: int) -> None:
    """Raise ConfigError if a model cannot read `longest` tokens, or if a row of this length would change how the model
    reads shorter rows of the same batch."""
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
            f"search.max_prompt_tokens + search.max_response_tokens must be <= {short}, got {longest}: the policy "
            "reads a longer row, and all other rows of its batch, with other factors (longrope)"
        )


def _short_rows(config: Mapping[str, Any]) -> int | None:
    """Return the largest number of tokens that a model with longrope reads with its short factors. Return None if the
    model has no separate long factors."""
    given = [it for name in ("rope_parameters", "rope_scaling") if isinstance(it := config.get(name), Mapping)]
    given += [it for of_kinds in given for it in of_kinds.values() if isinstance(it, Mapping)]
    for it in given:
        is_longrope = it.get("rope_type", it.get("type")) in ("longrope", "su")
        if is_longrope and it.get("short_factor") != it.get("long_factor"):
            name = "original_max_position_embeddings"
            return next((place[name] for place in (config, it) if _is_length(place.get(name))), None)
    return None


def _is_length(value: Any) -> bool:
    """True if a value can be a number of tokens. Other values are left to transformers, which reports them."""
    return type(value) is int and value > 0


def _names(value: Any) -> list[str]:
    return [it for it in value if isinstance(it, str)] if isinstance(value, list | tuple) else []
