"""A model that judges text: a reward model has one logit, a classifier one for each of its labels."""
# Shapes: N texts, C labels.

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from tba.batches.batching import buckets
from tba.models.pretrained import load_frozen


@dataclass(frozen=True)
class Judge:
    """A sequence classifier and its tokenizer; never trained here."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    tokens_per_batch: int = 8192

    @classmethod
    def load(
        cls,
        setting: str,
        path: str | Path,
        *,
        tokenizer_path: str | Path | None = None,
        dtype: str = "float32",
        device: str = "auto",
        device_setting: str = "",
    ) -> "Judge":
        """A decoder reads the last token that is no padding: where EOS pads, too, that is the one before a final
        EOS."""
        model, tokenizer = load_frozen(
            AutoModelForSequenceClassification, setting, path, tokenizer_path=tokenizer_path, dtype=dtype,
            device=device, device_setting=device_setting,
        )  # fmt: skip
        model.config.pad_token_id = tokenizer.pad_token_id  # by which decoders find the last token of a row
        return cls(model, tokenizer)

    @property
    def labels(self) -> int:
        return self.model.config.num_labels or 1

    @torch.inference_mode()
    def logits(self, texts: Sequence[str], *, max_tokens: int | None = None) -> Tensor:
        """[N, C] in float32 in main memory; of each text at most its first `max_tokens` tokens. What a text is judged
        with does not change its logits, but for rounding."""
        tokens = self.tokenizer(list(texts), truncation=max_tokens is not None, max_length=max_tokens).input_ids
        logits_NC = torch.empty(len(texts), self.labels)
        for chosen in buckets([len(row) for row in tokens], self.tokens_per_batch):
            padded = self.tokenizer.pad(
                {"input_ids": [tokens[i] for i in chosen]}, padding_side="right", return_tensors="pt"
            )
            logits_NC[chosen] = self.model(**padded.to(self.model.device)).logits.float().cpu()
        return logits_NC
