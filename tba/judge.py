"""A model that judges text: a reward model has one logit, a classifier one for each of its labels."""
# Shapes: N texts, C labels.

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tba.errors import ConfigError, Damaged
from tba.policy import buckets, cannot_load, resolve_device, resolve_dtype


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
        """From a Hugging Face folder or a hub name, safetensors only; the tokenizer from another where that is given.
        A decoder reads the last token that is no padding: where EOS pads, too, that is the one before a final EOS.

        ConfigError, naming the setting, if there is no such model or device, RunFailed if the hub could not be asked.
        """
        place = resolve_device(device, setting=device_setting or f"{setting}_device")
        weights = {"dtype": resolve_dtype(dtype), "use_safetensors": True}
        try:
            tokenizer = AutoTokenizer.from_pretrained(tokenizer_path or path)
            model, found = AutoModelForSequenceClassification.from_pretrained(path, output_loading_info=True, **weights)
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            why = cannot_load(setting, path, error)
            raise ConfigError(f"{setting}: {why}") if isinstance(why, Damaged) else why from error
        if missing := sorted(found["missing_keys"]):  # transformers fills them with random numbers
            raise ConfigError(f"{setting}: {str(path)!r} is no sequence classifier: it has no {', '.join(missing[:3])}")
        if tokenizer.pad_token_id is None:
            tokenizer.pad_token = tokenizer.eos_token
        model.config.pad_token_id = tokenizer.pad_token_id  # by which decoders find the last token of a row
        return cls(model.to(place).eval(), tokenizer)

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
