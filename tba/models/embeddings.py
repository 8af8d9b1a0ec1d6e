"""Measure how different texts are from each other, by the cosine distance of their sentence embeddings."""
# Shapes: N texts, B rows, T tokens with padding, D size of the embedding.

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from tba.batches.batching import buckets
from tba.models.pretrained import load_frozen


@dataclass(frozen=True)
class Encoder:
    """A model that turns texts into vectors of length 1: the last hidden states, averaged over the tokens and
    normalised."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    max_tokens: int = 256  # further tokens of a text are ignored
    tokens_per_batch: int = 8192

    @classmethod
    def load(cls, setting: str, path: str | Path, *, device: str = "auto") -> "Encoder":
        return cls(*load_frozen(AutoModel, setting, path, device=device, may_lack=("pooler.",)))

    @torch.inference_mode()
    def embed(self, texts: Sequence[str]) -> Tensor:
        """Return the [N, D] embeddings of texts, in float32 in main memory."""
        spoken = [text or " " for text in texts]  # some tokenizers make no tokens of an empty text
        tokens = self.tokenizer(spoken, truncation=True, max_length=self.max_tokens).input_ids
        embedded: list[Tensor] = [torch.empty(0)] * len(texts)
        for chosen in buckets([len(row) for row in tokens], self.tokens_per_batch):
            padded = self.tokenizer.pad(
                {"input_ids": [tokens[i] for i in chosen]}, padding_side="right", return_tensors="pt"
            ).to(self.model.device)
            hidden_BTD = self.model(**padded).last_hidden_state.float()
            mask_BT1 = padded["attention_mask"][:, :, None]
            mean_BD = (hidden_BTD * mask_BT1).sum(dim=1) / mask_BT1.sum(dim=1)
            for i, row in zip(chosen, nn.functional.normalize(mean_BD, dim=1).cpu(), strict=True):
                embedded[i] = row
        return torch.stack(embedded)


def cosine_distance(embeddings_ND: Tensor) -> float:
    """Return 1 - the mean of cos(e_i, e_j) over all pairs with i != j; 0 if all texts are the same. The sum over pairs
    is computed from the square of the sum of all vectors, which contains the cosine of every pair twice."""
    n = len(embeddings_ND)
    if n < 2:
        raise ValueError(f"a distance needs at least 2 embeddings, got {n}")
    unit_ND = nn.functional.normalize(embeddings_ND.double(), dim=1)
    pairs = unit_ND.sum(dim=0).square().sum() - unit_ND.square().sum()
    return 1 - float(pairs) / (n * (n - 1))
