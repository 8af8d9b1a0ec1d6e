"""Small models and what goes with them, made in milliseconds without a network: a random Llama, a tokenizer of
single characters, and trajectories."""

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tba.batches.batching import Batch
from tba.batches.logprobs import token_logps
from tba.batches.packing import groups_of
from tba.models.policy import Policy
from tba.train.micro_batches import Packed
from tba.types import Trajectory, Version

PAD, EOS = "<pad>", "<eos>"
PAD_ID, EOS_ID = 0, 1
CHARACTERS = "0123456789+-*/=.,:?#$ \nabcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def tiny_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """One token per character; `<pad>` is 0 and `<eos>` is 1."""
    vocabulary = {token: i for i, token in enumerate([PAD, EOS, "<unk>", *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
    )


def tiny_llama(
    *, seed: int = 0, tied: bool = True, characters: str = CHARACTERS, width: int = 32, layers: int = 2
) -> LlamaForCausalLM:
    """Random weights, about 25 000 unless it is asked for less, wide enough apart that predictions differ."""
    config = LlamaConfig(
        vocab_size=len(characters) + 3,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.3,
        tie_word_embeddings=tied,
        pad_token_id=PAD_ID,
        bos_token_id=None,
        eos_token_id=EOS_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def tiny_policy(*, seed: int = 0, tied: bool = True) -> Policy:
    return Policy(tiny_llama(seed=seed, tied=tied), tiny_tokenizer(), torch.device("cpu"))


def tiny_folder(folder: Path, *, seed: int = 0, tied: bool = True) -> Path:
    """The tiny policy as a Hugging Face folder."""
    tiny_policy(seed=seed, tied=tied).snapshot().save(folder)
    return folder


def trajectory(**changes: Any) -> Trajectory:
    """A finished response of three tokens; its reference log-probabilities are -1 each unless given."""
    tokens = tuple(changes.get("response_tokens", (5, 6, EOS_ID)))
    defaults: dict[str, Any] = {
        "searcher": 0,
        "round": 0,
        "slot": 0,
        "version_start": Version(0, 1),
        "version_end": Version(0, 1),
        "prompt_id": "p",
        "group_id": "0/0/p",
        "prompt": "1",
        "response": "23",
        "prompt_tokens": (4, 13),
        "response_tokens": tokens,
        "behaviour_logps": (-1.0,) * len(tokens),
        "ref_logps": (-1.0,) * len(tokens),
        "reference_version": Version(0, 1),
        "reward": 1.0,
        "finished": tokens[-1:] == (EOS_ID,),
        "temperature": 1.0,
        "top_p": 1.0,
        "seed": 0,
        "created_at": datetime(2030, 1, 1, tzinfo=UTC),
        "generate_seconds": 0.1,
    }
    return Trajectory(**{**defaults, **changes})


def response_logps(model: nn.Module, batch: Batch, *, temperature: float) -> Tensor:
    """[B] log-probability of each response: the sum over its counted tokens; 0 for one without any."""
    return token_logps(model, batch.tokens_BT, batch.response_mask_BT, temperature=temperature).sum(dim=1)


def batch_logps(model: PreTrainedModel, batch: Batch, *, temperature: float) -> Tensor:
    """[B, T] read as one packed row."""
    logp_R = Packed(*groups_of(batch)).logps(model, temperature=temperature)
    return logp_R.new_zeros(batch.tokens_BT.shape).masked_scatter(batch.response_mask_BT, logp_R)
