"""The sizes of models, from their files and from the table."""

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Qwen2Config,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from benchmarks.harness.tiny_models import tiny_folder, tiny_llama
from flows.planning.model_sizes import KNOWN, Model, find_model, read_model

RHO = LlamaConfig(
    vocab_size=32_000, hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
    num_key_value_heads=4,
)  # fmt: skip
PYTHIA_410M = GPTNeoXConfig(
    vocab_size=50_304, hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16
)
PYTHIA_7B = GPTNeoXConfig(
    vocab_size=50_432, hidden_size=4096, intermediate_size=16_384, num_hidden_layers=32, num_attention_heads=32
)


def qwen(
    vocabulary: int, hidden: int, intermediate: int, layers: int, heads: int, keys: int, tied: bool
) -> Qwen2Config:
    return Qwen2Config(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=keys, tie_word_embeddings=tied,
    )  # fmt: skip


DECODERS = {
    "realtreetune/rho-1b-sft-GSM8K": RHO,
    "mnoukhov/pythia410m-sft-tldr": PYTHIA_410M,
    "mnoukhov/pythia410m-rm-tldr6.9b": PYTHIA_410M,
    "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr": PYTHIA_7B,
    "gpt2": GPT2Config(),
    "vicgalle/gpt2-alpaca": GPT2Config(),
    "Qwen/Qwen2.5-0.5B": qwen(151_936, 896, 4864, 24, 14, 2, tied=True),
    "Qwen/Qwen2.5-1.5B": qwen(151_936, 1536, 8960, 28, 12, 2, tied=True),
    "Qwen/Qwen2.5-7B": qwen(152_064, 3584, 18_944, 28, 28, 4, tied=False),
}
ENCODERS = {
    "facebook/roberta-hate-speech-dynabench-r4-target": (
        RobertaForSequenceClassification,
        RobertaConfig(vocab_size=50_265, max_position_embeddings=514, type_vocab_size=1),
    ),
    "sentence-transformers/all-MiniLM-L6-v2": (
        BertModel,
        BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536),
    ),
}


@pytest.mark.parametrize("tied", [True, False])
def test_the_sizes_of_a_model_are_read_from_the_headers_of_its_files(tmp_path: Path, tied: bool):
    model, found = tiny_llama(tied=tied), read_model(tiny_folder(tmp_path, tied=tied))
    blocks = [sum(it.numel() for it in block.parameters()) for block in model.model.layers]
    parameters = sum(it.numel() for it in model.parameters())
    keys = model.config.num_key_value_heads * model.config.hidden_size // model.config.num_attention_heads
    assert found == Model(
        parameters, max(blocks), parameters - sum(blocks), len(blocks), 32, 64, model.config.vocab_size, 2 * 2 * keys
    )
    assert find_model(str(tmp_path)) == found


@pytest.mark.parametrize("name", DECODERS)
def test_the_table_has_the_sizes_that_a_decoder_has(name: str):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config := DECODERS[name])
    known, parameters = KNOWN[name], sum(it.numel() for it in model.parameters())
    keys = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    assert known.parameters == parameters == known.outside + known.layers * known.block
    assert (known.layers, known.hidden, known.vocabulary) == (
        config.num_hidden_layers, config.hidden_size, config.vocab_size
    )  # fmt: skip
    assert known.intermediate == (getattr(config, "intermediate_size", None) or 4 * known.hidden)
    assert known.cached == 2 * known.layers * keys * (known.hidden // config.num_attention_heads)


@pytest.mark.parametrize("name", ENCODERS)
def test_the_table_has_the_sizes_that_an_encoder_has(name: str):
    kind, config = ENCODERS[name]
    with torch.device("meta"):
        model = kind(config)
    known = KNOWN[name]
    assert (
        known.parameters == sum(it.numel() for it in model.parameters()) == known.outside + known.layers * known.block
    )


def test_every_model_of_the_table_is_tested():
    assert KNOWN.keys() == DECODERS.keys() | ENCODERS.keys()


def test_a_model_that_is_neither_here_nor_in_the_table_has_no_size(tmp_path: Path):
    assert find_model("somebody/unheard-of") is None
    assert find_model("s3://bucket/model") is None
    assert find_model(str(tmp_path)) is None
    assert find_model("gpt2") == KNOWN["gpt2"]
