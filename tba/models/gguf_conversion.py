"""Convert a GGUF file to an ordinary Hugging Face folder, with dequantised weights in float32."""

from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.errors import ConfigError
from tba.models.gguf_files import read_header
from tba.models.pretrained import LOADING

RECIPE = "1"
"""Version of this conversion. Raise it when the same file gives another folder than before."""


def convert(setting: str, file: Path, folder: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to a new folder. Raise ConfigError, naming the setting, if
    transformers cannot read the file."""
    header = read_header(setting, file)
    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        options = {"gguf_file": file.name, "dtype": torch.float32, "output_loading_info": True}
        with LOADING:
            read, found = cast(Any, AutoModelForCausalLM.from_pretrained(file.parent, **options))
        if missing := sorted(found["missing_keys"]):  # transformers fills them with random numbers
            raise ValueError(f"it has no {', '.join(missing[:3])}")
    except Exception as error:  # the reader of a damaged file may raise anything
        raise ConfigError(f"{setting}: transformers cannot read {str(file)!r}: {error!r:.500}") from error
    _split_as_trained(tokenizer, header.splitting)
    # transformers refuses to save a model that it has dequantised: give its weights to a new model.
    del read.config.quantization_config
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read.config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = read.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _split_as_trained(tokenizer: Any, splitting: str) -> None:
    """Split texts before byte-pair encoding as in the model's training. transformers ignores what the GGUF file says
    about this; for SmolLM2, about one text in ninety of GSM8K would get other tokens."""
    if splitting == "smollm":
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
