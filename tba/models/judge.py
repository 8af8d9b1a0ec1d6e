"""A model that judges text: a reward model, which has one logit, or a classifier, which has one logit per label."""
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
    """A sequence classifier and its tokenizer, which are never trained here."""

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
        """Load a judge. If the judge is a decoder, its score is read at the last token of the text that is not the
        padding token. If EOS is also the padding token, a final EOS is skipped too."""
        model, tokenizer = load_frozen(
            AutoModelForSequenceClassification, setting, path, tokenizer_path=tokenizer_path, dtype=dtype,
            device=device, device_setting=device_setting,
        )  # fmt: skip
        model.config.pad_token_id = tokenizer.pad_token_id  # decoders find the last token of a row by it
        return cls(model, tokenizer)

    @property
    def labels(self) -> int:
        return self.model.config.num_labels or 1

    @torch.inference_mode()
    def logits(self, texts: Sequence[str], *, max_tokens: int | None = None) -> Tensor:
        """Return [N, C] logits in float32 in main memory. Only the first `max_tokens` tokens of each text are read. A
        text's logits depend on the other texts only by rounding."""
        tokens = self.tokenizer(list(texts), truncation=max_tokens is not None, max_length=max_tokens).input_ids
        logits_NC = torch.empty(len(texts), self.labels)
        for chosen in buckets([len(row) for row in tokens], self.tokens_per_batch):
            padded = self.tokenizer.pad(
                {"input_ids": [tokens[i] for i in chosen]}, padding_side="right", return_tensors="pt"
            )
            logits_NC[chosen] = self.model(**padded.to(self.model.device)).logits.float().cpu()
        return logits_NC
