"""Batches that are read in micro-batches."""

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel

from benchmarks.harness.tiny_models import EOS_ID, tiny_tokenizer, trajectory
from tba.models.policy import Policy
from tba.train.learner import Learner
from tba.types import Trajectory
from tests.support.tba.trainers import settings

K, BETA = 3, 0.5
with torch.random.fork_rng(devices=[]):
    torch.manual_seed(0)
    GPT2 = GPT2LMHeadModel(
        GPT2Config(
            n_embd=16, n_layer=2, n_head=2, initializer_range=0.3, vocab_size=78, bos_token_id=None,
            eos_token_id=EOS_ID, n_positions=64, embd_pdrop=0.0, resid_pdrop=0.0, attn_pdrop=0.0,
        )
    ).double().eval()  # fmt: skip
"""A model of which every part computes in double precision."""


def group(slot: int, prompt: int, lengths: Sequence[int], *, holes: bool = False) -> list[Trajectory]:
    """Make a group with these lengths of the prompt and of its responses, EOS included. `holes` are tokens of
    others."""
    return [
        trajectory(
            prompt_id=str(slot),
            prompt_tokens=tuple(4 + slot + i for i in range(prompt)),
            response_tokens=(tokens := (*(10 + (7 * slot + 5 * j + i * i) % 60 for i in range(length - 1)), EOS_ID)),
            behaviour_logps=tuple(-3.0 - 0.5 * ((i + j) % 5) for i in range(length)),
            ref_logps=tuple(-4.0 + 0.7 * ((i * j + slot) % 4) for i in range(length)),
            reward=float((slot + j) % 2) + 0.1 * j,
            step_ends=(1, length) if length > 1 else (length,),
            step_values=(0.5, 0.3 * j) if length > 1 else (0.4,),
            **({"loss_mask": tuple(i % 3 != 1 for i in range(len(tokens)))} if holes else {}),
        )
        for j, length in enumerate(lengths)
    ]


ROWS = [*group(0, 3, [2, 4, 1]), *group(1, 2, [9, 14, 6]), *group(2, 4, [3, 1, 5], holes=True), *group(3, 1, [1, 1, 2])]
"""Four groups of which a model reads 7, 28, 10 and 2 tokens: 47 in all, with each prompt read once."""


def make(
    *, model: PreTrainedModel = GPT2, packs: bool = True, rows: list[Trajectory] = ROWS, **changes: Any
) -> Learner:
    """Return a learner in the middle of a run: auxiliary model and reference differ from their start."""
    usual = {
        "training__prompts_per_step": len(rows) // K,
        "training__responses_per_prompt": K,
        "training__groups_per_micro_batch": None,
        "training__computed_rows": "all",
        "search__responses_per_prompt": K,
        "search__initial_fill": 100,
        "search__temperature": 0.7,
    }
    config = settings(**{**usual, **changes})
    policy = Policy(copy.deepcopy(model), tiny_tokenizer(), torch.device("cpu"))
    learner = Learner(config, policy)
    learner.packs = packs
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        if learner.auxiliary:
            weight_D = learner.auxiliary.model.head.weight_D
            weight_D.copy_(torch.randn(weight_D.shape, generator=generator))
        learner.reset_reference(2)
        if learner.reference:
            for it in learner.reference.model.parameters():
                it.add_(0.1 * torch.randn(it.shape, generator=generator))
    return learner
