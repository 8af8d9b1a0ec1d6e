"""What can be told of a model from its files, before any of its weights is read: whether it can be a policy.

Imports no torch, so that whoever starts a run can look.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba.errors import ConfigError

_TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt",
)  # fmt: skip
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_OTHER_ENDS = (
    "ForMaskedLM", "ForPreTraining", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering",
)  # fmt: skip


def check_folder(setting: str, folder: Path, *, longest: int) -> None:
    """ConfigError if a Hugging Face folder, which this setting names, holds no policy of a run whose prompts and
    responses have at most so many tokens together. What passes may still not load."""
    config = _config_of(folder)
    fault = why_no_policy(config) if config else "no config.json that can be read"
    if not any(folder.glob("*.safetensors")):
        pickled = sorted(it.name for kind in _PICKLED for it in folder.glob(kind))
        fault = fault or "no weights (*.safetensors)" + (
            f", only {pickled[0]}, which is pickled and could run any code: save it as safetensors" if pickled else ""
        )
    if not any((folder / name).exists() for name in _TOKENIZER) and not any(folder.glob("*.tiktoken")):
        fault = fault or "no tokenizer"
    if fault:
        raise ConfigError(f"{setting}: {str(folder)!r} holds no policy that can be trained: {fault}")
    check_length(config, longest)


def why_no_policy(config: Mapping[str, Any]) -> str:
    """What a model's config.json says that a policy must not be; empty if nothing."""
    kind, architectures = config.get("model_type", "unknown"), config.get("architectures") or ()
    if config.get("is_encoder_decoder"):
        return f"{kind} has an encoder and a decoder, and does not continue its prompt"
    if other := next((it for it in architectures if it.endswith(_OTHER_ENDS)), None):
        return f"a {other} is no causal language model"
    if quantised := config.get("quantization_config"):
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else "unknown"
        return f"its weights are quantised ({method}); save them as float32 or bfloat16"
    return ""


def check_length(config: Mapping[str, Any], longest: int) -> None:
    """ConfigError if a model cannot read so many tokens."""
    text = config.get("text_config")
    places = [it for it in (text, config) if isinstance(it, Mapping)]
    found = [it[name] for it in places for name in ("max_position_embeddings", "n_positions") if it.get(name)]
    if found and longest > found[0]:
        raise ConfigError(
            f"search.max_prompt_tokens + search.max_response_tokens must be <= {found[0]}, the length that the policy "
            f"can read, got {longest}"
        )


def _config_of(folder: Path) -> Mapping[str, Any]:
    """Empty if there is none."""
    try:
        found = json.loads((folder / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
