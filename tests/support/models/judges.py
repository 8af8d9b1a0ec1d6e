"""Tiny models that judge text."""

from pathlib import Path

import torch
from transformers import GPT2Config, GPT2ForSequenceClassification, RobertaConfig, RobertaForSequenceClassification

from benchmarks.harness.tiny_models import CHARACTERS, EOS_ID, PAD_ID, tiny_tokenizer


def classifier(folder: Path, kind: str, labels: int, *, seed: int = 0, positions: int = 128) -> Path:
    """A decoder, which reads the last token of a row, or an encoder, which reads the first."""
    size = len(CHARACTERS) + 3
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "decoder":
            model = GPT2ForSequenceClassification(
                GPT2Config(vocab_size=size, n_embd=32, n_layer=2, n_head=4, n_positions=positions, num_labels=labels,
                           initializer_range=0.3, bos_token_id=EOS_ID, eos_token_id=EOS_ID)
            )  # fmt: skip
        else:
            model = RobertaForSequenceClassification(
                RobertaConfig(vocab_size=size, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
                              intermediate_size=64, max_position_embeddings=positions + 2, num_labels=labels,
                              initializer_range=0.3, pad_token_id=PAD_ID)
            )  # fmt: skip
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder
