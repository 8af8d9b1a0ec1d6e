"""The policy: a causal language model and its tokenizer, loaded, copied, hashed and saved as a Hugging Face folder."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tba.batches.batching import buckets, pad
from tba.batches.logprobs import token_logps
from tba.batches.packing import CannotPack, Group, can_pack, packed_logps, rows, why_attention_pads
from tba.batches.padded_calls import tokens_per_call
from tba.models import adapters
from tba.models.adapters import Adapter, AdapterSnapshot
from tba.models.pretrained import computing, load, load_frozen, lower_products, resolve_dtype
from tba.models.saving import weight_digests
from tba.models.saving.stored_model import SAVING, stored_weights, without_weights
from tba.models.saving.weight_files import Written, write_model
from tba.runtime.host_copies import HostCopies, size_of
from tba.runtime.parking import Parking
from tba.types import Prompt, Response, Version


@dataclass(frozen=True)
class Snapshot:
    """A copy of a model that never changes, with its tokenizer. Any thread can save and hash the copy."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    def save(self, folder: Path, *, dtype: str | None = None, before: Path | None = None) -> Written:
        """Write a Hugging Face folder: safetensors, config, generation config and tokenizer. Weights are converted to
        `dtype` if it is given. Return the digests of the weight files and, if `before` is the folder of an earlier
        version, the share of the weights that differ from it."""
        wanted = self.model.dtype if dtype is None else resolve_dtype(dtype, setting="model.publish_dtype")
        with SAVING:
            without_weights(self.model, wanted).save_pretrained(folder, state_dict={})
            self.tokenizer.save_pretrained(folder)
        return write_model(folder, stored_weights(self.model, wanted), before=before)

    @cached_property
    def sha256(self) -> str:
        """Digest of the weights, hashed in pieces (tba/models/saving/weight_digests.py)."""
        return weight_digests.digest(self.model.state_dict())

    @cached_property
    def whole_sha256(self) -> str:
        """Digest of the weights, hashed as a whole."""
        return weight_digests.whole_digest(self.model.state_dict())

    def digest(self, kind: str) -> str:
        """Return the digest of the weights of a kind, as `sync.weights_digest` names it."""
        return self.whole_sha256 if kind == "whole" else self.sha256

    def digest_like(self, stored: str | None) -> str:
        """Return the digest of the weights that has the kind of a stored digest."""
        return self.digest(weight_digests.kind_of(stored))


@dataclass(frozen=True)
class Policy:
    """A causal language model with its tokenizer. The model stays in evaluation mode, also in training, so that dropout
    is off."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    device: torch.device
    adapter: Adapter | None = field(default=None, kw_only=True)  # set if only an adapter is trained

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: str = "float32",
        device: str = "auto",
        revision: str = "main",
        trust_remote_code: bool = False,
    ) -> "Policy":
        """Load a policy from a Hugging Face folder or a hub name. Raises the errors of `tba.models.pretrained.load`."""
        model, tokenizer = load(
            AutoModelForCausalLM, "model.path", path, dtype=dtype, device=device, device_setting="model.device",
            revision=revision, trust_remote_code=trust_remote_code, trains=True,
        )  # fmt: skip
        _make_savable(model)
        return cls(model, tokenizer, model.device)

    @classmethod
    def load_adapted(cls, adapter: Adapter, folder: Path | None, *, seed: int = 0, **options: Any) -> "Policy":
        """Load the base model of an adapter, together with the adapter in a folder. If `folder` is None, the adapter is
        fresh and determined by the seed. `options` are those of `load`. Raises the errors of `load` and of
        `Adapter.read_into`."""
        base = cls.load(adapter.base, **options)
        adapter.put_into(base.model, seed=seed)
        if folder is None:
            adapter.check_names(base.model)
        else:
            adapter.read_into(base.model, folder)
        return replace(base, adapter=adapter)

    @classmethod
    def load_frozen(cls, setting: str, path: str | Path, *, dtype: str = "float32", device: str = "auto") -> "Policy":
        """Load a language model that a task uses. Such a model is never trained here."""
        model, tokenizer = load_frozen(AutoModelForCausalLM, setting, path, dtype=dtype, device=device)
        return cls(model, tokenizer, model.device)

    @property
    def pad_id(self) -> int:
        """The token that pads rows on the right. Any token in the model's embedding would do."""
        candidates = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
        known = cast(Any, self.model.get_input_embeddings()).weight.shape[0]
        return next((token for token in candidates if isinstance(token, int) and token < known), 0)

    def twin(self) -> PreTrainedModel:
        """Return a copy of the model on the same device. The copy shares the frozen parameters."""
        return cast(PreTrainedModel, adapters.copy_of(self.model))

    def backbone_twin(self) -> PreTrainedModel:
        """Return a copy of the model without its output layer, on the same device. The copy shares the frozen
        parameters."""
        return cast(PreTrainedModel, adapters.copy_of(self.model.base_model))

    def spread(self, module: nn.Module) -> None:
        """Spread a small module that is trained together with the policy over the processes that hold the policy."""

    def snapshot(self) -> Snapshot | AdapterSnapshot:
        """Return a copy of the model in main memory, or of the adapter alone if only an adapter is trained. Further
        training does not change the copy."""
        if self.adapter:
            return adapters.snapshot(self.model, self.adapter)
        return Snapshot(_frozen_copy(self.model), self.tokenizer)


class PolicyScorer:
    """Computes log-probabilities of responses under a policy that is not trained, such as the reference.

    Groups are packed into rows of at most `tokens_per_batch` tokens; a longer response has a row of its own. A model
    that cannot read packed rows reads each response with its prompt, in batches of at most `tokens_per_batch` tokens
    with padding.
    """

    def __init__(
        self,
        policy: Policy,
        version: Version,
        *,
        tokens_per_batch: int | None = None,
        compute_dtype: str = "float32",
        owns: bool = False,
    ):
        """`compute_dtype` must be that of the trainer: otherwise differences in rounding would look like a log-ratio.
        With `owns`, nobody else uses the policy, and weights are kept in the format of their products."""
        on_cpu = policy.device.type == "cpu"  # a small batch stays in a CPU's cache, and a call costs little there
        self.policy, self.version, self.compute_dtype = policy, version, compute_dtype
        self.tokens_per_batch = tokens_per_batch or (2048 if on_cpu else 8192)
        self.tokens_per_call = tokens_per_call(policy.device)
        self.packs = can_pack(policy.model)
        self.parking = Parking(lambda: [policy.model])
        if owns:
            lower_products(policy.model, compute_dtype)
        self.attention_pads_because = ""
        if self.packs:
            with computing(policy.model, compute_dtype):
                self.attention_pads_because = why_attention_pads(policy.model)

    def token_logps(
        self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Response]], *, temperature: float
    ) -> list[list[tuple[float, ...]]]:
        """Return, for each prompt and each of its responses, the log-probabilities of the response's tokens, EOS
        included. Equal responses to a prompt are read once."""
        distinct = [list(dict.fromkeys(it.tokens for it in group)) for group in responses]
        groups = [Group(prompt.tokens, tokens) for prompt, tokens in zip(prompts, distinct, strict=True)]
        with computing(self.policy.model, self.compute_dtype):
            logps = iter(self._logps(groups, temperature))
        by_tokens = [dict(zip(tokens, logps, strict=False)) for tokens in distinct]
        return [[known[it.tokens] for it in group] for known, group in zip(by_tokens, responses, strict=True)]

    def park(self) -> None:
        self.parking.park()

    def unpark(self) -> None:
        self.parking.unpark()

    def _logps(self, groups: Sequence[Group], temperature: float) -> list[tuple[float, ...]]:
        if self.packs:
            try:
                return [
                    logps for row in rows(groups, self.tokens_per_batch) for logps in self._packed(row, temperature)
                ]
            except CannotPack:
                self.packs = False
        return self._padded([(group.prompt, tokens) for group in groups for tokens in group.responses], temperature)

    def _packed(self, row: Sequence[Group], temperature: float) -> list[tuple[float, ...]]:
        return packed_logps(self.policy.model, row, temperature=temperature, tokens_per_call=self.tokens_per_call)

    def _padded(
        self, asked: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], temperature: float
    ) -> list[tuple[float, ...]]:
        logps: list[tuple[float, ...]] = [()] * len(asked)
        for chosen in buckets([len(prompt) + len(response) for prompt, response in asked], self.tokens_per_batch):
            scored = self._score([asked[i] for i in chosen], temperature)
            for i, row in zip(chosen, scored, strict=True):
                logps[i] = row
        return logps

    @torch.inference_mode()
    def _score(
        self, asked: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], temperature: float
    ) -> Iterator[tuple[float, ...]]:
        prompts, responses = zip(*asked, strict=True)
        padded = pad(prompts, responses, pad_id=self.policy.pad_id, device=self.policy.device)
        logps_BT = token_logps(
            self.policy.model, padded.tokens_BT, padded.response_mask_BT, temperature=temperature
        ).tolist()
        return (
            tuple(row[len(prompt) : len(prompt) + len(response)])
            for row, (prompt, response) in zip(logps_BT, asked, strict=True)
        )


def _frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of a model in main memory.

    `deepcopy` finds a copy of every tensor in its memo. So no tensor is copied twice, gradients are not copied at all,
    and tied weights stay tied.
    """
    copies = HostCopies(size_of([*model.parameters(), *model.buffers()]))
    memo: dict[int, Tensor] = {id(buffer): copies.copy(buffer) for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(copies.copy(parameter), requires_grad=False)
    copies.finish()
    return copy.deepcopy(model, memo)


def _make_savable(model: PreTrainedModel) -> None:
    """Make the generation config of a model savable. Some published models combine `do_sample=False` with sampling
    settings such as a temperature; transformers loads such a config but refuses to save it."""
    try:
        model.generation_config.validate(strict=True)
    except ValueError:
        model.generation_config.do_sample = True
