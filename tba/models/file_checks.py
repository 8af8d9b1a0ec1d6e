"""Check the small files of a model's folder before a library reads them, and name each damaged file with its fault.

Libraries do not name the file if its JSON is cut off or nested too deeply. They ignore some files that they cannot
read, and wait forever if a named pipe has the name of a file. This module does not import torch, so that a command that
starts a run can use it.
"""

import json
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tba.errors import Damaged

INDEX = "model.safetensors.index.json"
_OBJECTS = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", INDEX, "adapter_config.json", "chat_template.json",
)  # fmt: skip
"""Files that hold one JSON object each."""
_TEMPLATE, _MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates/*.jinja"
_WEIGHTS = "*.safetensors"
_READ = (".json", ".jinja", ".txt", ".model", ".tiktoken", ".py")
"""Suffixes of the files that libraries open."""
_KINDS = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a named pipe"), (stat.S_ISSOCK, "a socket"))


def check_files(folder: Path) -> None:
    """Raise Damaged, naming the file and its fault, if a small file of a model's folder is unreadable, or if a weight
    file is not a regular file. The contents of weight files are not read."""
    if fault := why_damaged(folder):
        raise Damaged(f"{folder}: {fault}")


def why_damaged(folder: Path) -> str:
    """Return which file of a model's or an adapter's folder is damaged, and how. Return an empty string if none is.
    Weight files are only checked to be regular files; their contents are not read."""
    for path in _present(folder):
        if fault := _why_no_file(path) or _why_unreadable(path):
            return f"{path.relative_to(folder)} {fault}"
    return ""


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise Damaged, naming the file, if it holds no JSON object."""
    if fault := _why_no_file(path):
        raise Damaged(f"{path} {fault}")
    try:
        return _decoded(path.read_bytes())
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} {error}") from None


def weight_names(data: bytes) -> set[str]:
    """Return the names of the files that an index of weights lists. Raise ValueError if the data is no index of
    weights."""
    found = _decoded(data)
    if fault := _why_no_index(found):
        raise ValueError(fault)
    return set(found["weight_map"].values())


def _present(folder: Path) -> Iterator[Path]:
    """Yield the paths in a folder that libraries would open, even if they are not regular files."""
    named = [*(folder / name for name in (*_OBJECTS, _TEMPLATE)), *sorted(folder.glob(_MORE_TEMPLATES))]
    yield from (path for path in named if path.exists() or path.is_symlink())
    for path in sorted(folder.glob("*")):
        is_special = path.suffix in _READ and path.exists() and not path.is_dir()
        if path not in named and (path.match(_WEIGHTS) or is_special):
            yield path


def _why_no_file(path: Path) -> str:
    """Return an empty string if a path is a regular file or a link to one. Otherwise return what is at the path
    instead."""
    try:
        mode = path.stat().st_mode
    except OSError as error:
        return "is a link that leads nowhere" if path.is_symlink() else f"cannot be read: {error.strerror}"
    if stat.S_ISREG(mode):
        return ""
    return f"is {next((kind for is_kind, kind in _KINDS if is_kind(mode)), 'a device')}, not a file"


def _why_unreadable(path: Path) -> str:
    """Return what is wrong with the contents of a file. Return an empty string if nothing is."""
    try:
        if path.suffix == ".jinja":
            return _why_no_text(path.read_bytes())
        return _why_wrong_type(path.name, _decoded(path.read_bytes())) if path.name in _OBJECTS else ""
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except ValueError as error:
        return str(error)


def _decoded(data: bytes) -> dict[str, Any]:
    """Return the JSON object that the bytes encode. If they encode something else, raise ValueError, saying what."""
    if fault := _why_no_text(data):
        raise ValueError(fault)
    try:
        found = json.loads(data.decode())
    except RecursionError:
        raise ValueError("is not readable JSON: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"holds a JSON {type(found).__name__}, not an object")
    return found


def _why_no_text(data: bytes) -> str:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return f"is not UTF-8: {error.reason} at byte {error.start}"
    return f"holds a NUL byte at byte {data.index(0)}" if "\0" in text else ""


def _why_wrong_type(name: str, found: Mapping[str, Any]) -> str:
    """Return which value in a file has a type that no library expects there. Return an empty string if none has."""
    if name == INDEX:
        return _why_no_index(found)
    odd = [token for token, number in found.items() if type(number) is not int]
    if name == "added_tokens.json" and odd:
        return f"must give a whole number for each token, got {found[odd[0]]!r:.80} for {odd[0]!r:.80}"
    if name == "config.json":
        names = found.get("architectures")
        if names is not None and not (isinstance(names, list) and all(isinstance(it, str) for it in names)):
            return f"must have a list of names as `architectures`, got {names!r:.80}"
        if not isinstance(found.get("model_type", ""), str):
            return f"must have a text as `model_type`, got {found['model_type']!r:.80}"
    return ""


def _why_no_index(found: Mapping[str, Any]) -> str:
    names = found.get("weight_map")
    if isinstance(names, dict) and all(isinstance(it, str) for it in names.values()):
        return ""
    return f"must have names of files as `weight_map`, got {names!r:.80}"
