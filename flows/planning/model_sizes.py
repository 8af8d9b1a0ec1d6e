"""Sizes of models: from the headers of their files if these are on this machine, else from a table of the models that
presets name, so that memory can be planned before anything is downloaded."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tba.config import Config
from tba.errors import ConfigError, Damaged
from tba.models.file_checks import check_files, read_object
from tba.models.folder import sizes_of, weight_files
from tba.models.gguf_files import Header, find_gguf, is_gguf, read_header
from tba.models.location import local_path
from tba.runtime.installed_packages import find_in_package, is_in_package


@dataclass(frozen=True)
class Model:
    """The sizes of a model."""

    parameters: int
    block: int  # parameters of the largest layer
    outside: int  # parameters that belong to no layer
    layers: int
    hidden: int
    intermediate: int
    vocabulary: int = 0
    cached: int = 0  # numbers that the key-value cache keeps per token


def decoder(
    *,
    vocabulary: int,
    hidden: int,
    intermediate: int,
    layers: int,
    keys: int,
    tied: bool = False,
    biases: int = 0,
    gated: bool = True,
    positions: int = 0,
) -> Model:
    """Return the sizes of a decoder-only transformer. `keys` is the number of key heads times their size, and `biases`
    the number of biases in a layer, norms' included."""
    block = 2 * hidden * hidden + 2 * hidden * keys + (3 if gated else 2) * hidden * intermediate + 2 * hidden + biases
    norms = hidden if gated else 2 * hidden
    outside = (1 if tied else 2) * vocabulary * hidden + positions * hidden + norms
    return Model(
        layers * block + outside, block, outside, layers, hidden, intermediate, vocabulary, cached=2 * layers * keys
    )


def _with_biases(*, hidden: int, **sizes: Any) -> Model:
    """Return the sizes of a decoder whose linear layers and norms all have biases, and whose keys have as many heads as
    its queries: the GPT family."""
    return decoder(
        hidden=hidden, intermediate=4 * hidden, keys=hidden, gated=False, biases=11 * hidden, **sizes
    )  # fmt: skip


def _qwen(**sizes: Any) -> Model:
    biases = sizes["hidden"] + 2 * sizes["keys"]
    return decoder(**sizes, biases=biases)


_RHO = decoder(vocabulary=32_000, hidden=2048, intermediate=5632, layers=22, keys=256)
_PYTHIA_410M = _with_biases(vocabulary=50_304, hidden=1024, layers=24)
_GPT2 = _with_biases(vocabulary=50_257, hidden=768, layers=12, tied=True, positions=1024)

KNOWN: Mapping[str, Model] = {
    "realtreetune/rho-1b-sft-GSM8K": _RHO,
    "mnoukhov/pythia410m-sft-tldr": _PYTHIA_410M,
    "mnoukhov/pythia410m-rm-tldr6.9b": _PYTHIA_410M,
    "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr": _with_biases(vocabulary=50_432, hidden=4096, layers=32),
    "gpt2": _GPT2,
    "vicgalle/gpt2-alpaca": _GPT2,
    "facebook/roberta-hate-speech-dynabench-r4-target": Model(124_647_170, 7_087_872, 39_592_706, 12, 768, 3072),
    "sentence-transformers/all-MiniLM-L6-v2": Model(22_713_216, 1_774_464, 12_066_432, 6, 384, 1536),
    "Qwen/Qwen2.5-0.5B": _qwen(
        vocabulary=151_936, hidden=896, intermediate=4864, layers=24, keys=128, tied=True
    ),
    "Qwen/Qwen2.5-1.5B": _qwen(
        vocabulary=151_936, hidden=1536, intermediate=8960, layers=28, keys=256, tied=True
    ),
    "Qwen/Qwen2.5-7B": _qwen(vocabulary=152_064, hidden=3584, intermediate=18_944, layers=28, keys=512),
}  # fmt: skip
"""Sizes by the name on the Hugging Face hub. A classifier on top of a decoder counts as the decoder."""


def find_policy(config: Config) -> Model | None:
    """Return the sizes of the policy, or None if they are unknown."""
    return find_model(config.model.path, revision=config.model.revision) if config.model.path else None


def find_model(place: str, *, revision: str = "main") -> Model | None:
    """Return the sizes of a model that is on this machine, as a folder, a GGUF file or in the cache of the Hugging Face
    hub, or that is in the table. Return None for any other model."""
    if "://" in place:
        return None
    try:
        if is_gguf(place):
            header = read_header("model.path", find_gguf("model.path", place))
            return _of_gguf(header)
        folder = find_in_package("model.path", place) if is_in_package(place) else local_path("model.path", place)
    except ConfigError:
        return None
    try:
        if not folder.is_dir():
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(place, "config.json", revision=revision)
            folder = Path(cached).parent if isinstance(cached, str) else folder
        found = read_model(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, Damaged):
        found = None
    return found or KNOWN.get(place)


def _of_gguf(header: Header) -> Model:
    sizes, hidden = header.sizes, header.hidden
    vocabulary, keys = (sizes.get(name, 0) // hidden for name in ("token_embd.weight", "blk.0.attn_k.weight"))
    return _model(sizes, hidden, header.intermediate, vocabulary=vocabulary, keys=keys)


def read_model(folder: Path) -> Model | None:
    """Return the sizes of the model in a folder, or None if its weights are not there. Raise Damaged if a file is
    damaged."""
    check_files(folder)
    plain: dict[str, Any] = read_object(folder / "config.json")
    plain = plain.get("text_config") or plain
    sizes = {name: size for path in weight_files(folder) for name, size in sizes_of(path).items()}
    if not sizes:
        return None
    hidden = plain.get("hidden_size") or plain["n_embd"]
    heads = plain.get("num_attention_heads") or plain.get("n_head")
    keys = (plain.get("num_key_value_heads") or heads) * (plain.get("head_dim") or hidden // heads) if heads else 0
    intermediate = plain.get("intermediate_size") or plain.get("n_inner") or 4 * hidden
    return _model(sizes, hidden, intermediate, vocabulary=plain.get("vocab_size") or 0, keys=keys)


def _model(sizes: Mapping[str, int], hidden: int, intermediate: int, *, vocabulary: int = 0, keys: int = 0) -> Model:
    """Return the sizes of a model, from the number of elements of each tensor. Layers are numbered in the names."""
    blocks: dict[str, int] = {}
    for name, size in sizes.items():
        if block := re.match(r".*?\.\d+\.", name):
            blocks[block[0]] = blocks.get(block[0], 0) + size
    return Model(
        parameters=sum(sizes.values()),
        block=max(blocks.values(), default=0),
        outside=sum(sizes.values()) - sum(blocks.values()),
        layers=len(blocks),
        hidden=hidden,
        intermediate=intermediate,
        vocabulary=vocabulary,
        cached=2 * len(blocks) * keys,
    )
