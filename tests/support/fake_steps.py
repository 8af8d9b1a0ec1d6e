"""Models and batches of known sizes, for steps on tensors without contents."""

from dataclasses import replace

from transformers import Qwen2Config

from flows.planning.model_sizes import Model
from tba.batches.packing import Group

HEADS = {"Qwen/Qwen2.5-0.5B": (14, 2), "Qwen/Qwen2.5-1.5B": (12, 2)}
RESPONSES, PROMPT = 8, 16


def with_layers(model: Model, layers: int) -> Model:
    return replace(model, layers=layers, parameters=model.outside + layers * model.block)


def architecture(name: str, size: Model) -> Qwen2Config:
    heads, keys = HEADS[name]
    return Qwen2Config(
        vocab_size=size.vocabulary, hidden_size=size.hidden, intermediate_size=size.intermediate,
        num_hidden_layers=size.layers, num_attention_heads=heads, num_key_value_heads=keys, tie_word_embeddings=True,
    )  # fmt: skip


def full_row(tokens: int) -> list[Group]:
    """Return a row of one group, in which a model reads at most so many tokens."""
    response = (5,) * ((tokens - PROMPT) // RESPONSES + 1)  # without its last token, as it is not read
    row = [Group(tuple(range(PROMPT)), [response] * RESPONSES)]
    assert row[0].read <= tokens
    return row
