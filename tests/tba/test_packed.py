import copy

import pytest
import torch
from torch import nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DogeConfig,
    DogeForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    ZayaConfig,
    ZayaForCausalLM,
)

from tba.errors import DataError
from tba.packed import Group, can_pack, packed_logps, rows
from tba.policy import Policy, PolicyScorer
from tba.types import Prompt, Response, Version
from tests.tba.tiny import EOS_ID, tiny_llama, tiny_tokenizer

SMALL = {"vocab_size": 78, "bos_token_id": None, "eos_token_id": 1}
LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
WIDE = {"initializer_range": 0.3}
HEADS = {"num_key_value_heads": 2, "head_dim": 8}

PACKED = [
    tiny_llama(),
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, **WIDE, **SMALL)),
    GPTNeoXForCausalLM(GPTNeoXConfig(**WIDE, **LAYERS, **SMALL)),
    Qwen3ForCausalLM(Qwen3Config(**HEADS, **WIDE, **LAYERS, **SMALL)),
    OPTForCausalLM(OPTConfig(ffn_dim=64, word_embed_proj_dim=32, init_std=0.3, **LAYERS, **SMALL)),
    GraniteForCausalLM(GraniteConfig(logits_scaling=3.0, **WIDE, **LAYERS, **SMALL)),
]


class FromElsewhere(LlamaForCausalLM):
    """As a model of somebody else's code."""


class TurnsBack(MistralForCausalLM):
    """Says of itself that it can be given another attention, and in one layer it has its own."""

    def set_attn_implementation(self, attn_implementation: str | dict, allow_all_kernels: bool = False) -> None:
        super().set_attn_implementation(attn_implementation, allow_all_kernels)
        self.model.layers[1].self_attn.config = copy.copy(self.config)
        self.model.layers[1].self_attn.config._attn_implementation = "sdpa"


TurnsBack.__module__ = MistralForCausalLM.__module__

PADDED = [
    Gemma2ForCausalLM(Gemma2Config(sliding_window=4, **HEADS, **WIDE, **LAYERS, **SMALL)),
    Gemma2ForCausalLM(Gemma2Config(layer_types=["full_attention"] * 2, **HEADS, **WIDE, **LAYERS, **SMALL)),
    MistralForCausalLM(MistralConfig(sliding_window=4, **HEADS, **WIDE, **LAYERS, **SMALL)),
    BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, **WIDE, **SMALL)),
    DogeForCausalLM(DogeConfig(**HEADS, **WIDE, **LAYERS, **SMALL)),
    ZayaForCausalLM(ZayaConfig(num_key_value_heads=2, **LAYERS, **SMALL)),
    FromElsewhere(tiny_llama().config),
    TurnsBack(MistralConfig(sliding_window=None, **HEADS, **WIDE, **LAYERS, **SMALL)),
]


def response(*tokens: int, loss_mask: tuple[bool, ...] | None = None) -> Response:
    return Response(
        tokens=tokens, logps=(0.0,) * len(tokens), text="", finished=tokens[-1:] == (EOS_ID,), temperature=1.0,
        top_p=1.0, seed=0, version_start=Version(0, 1), version_end=Version(0, 1), generate_seconds=0.0,
        loss_mask=loss_mask,
    )  # fmt: skip


PROMPTS = [Prompt(prompt_id=str(tokens), text="", tokens=tokens) for tokens in [(4, 5, 6), (7,), (8,), (4, 5, 6, 9)]]
RESPONSES = [
    [response(10, EOS_ID), response(*range(10, 40)), response(10, 11, EOS_ID), response(10, EOS_ID)],
    [response(EOS_ID), response(11), response(12, 13, 14, EOS_ID)],
    [],  # all that it had was left out
    [response(15, EOS_ID, 30, 31, 32, 16, EOS_ID, loss_mask=(True,) * 2 + (False,) * 3 + (True,) * 2)],
]
GROUPS = [Group(p.tokens, [r.tokens for r in group]) for p, group in zip(PROMPTS, RESPONSES, strict=True)]


def by_hand(model: PreTrainedModel, temperature: float) -> list[list[tuple[float, ...]]]:
    """Of each sequence alone, from the logits of every position."""
    return [[alone(model, group.prompt, answer, temperature) for answer in group.responses] for group in GROUPS]


@torch.no_grad()
def alone(
    model: PreTrainedModel, prompt: tuple[int, ...], answer: tuple[int, ...], temperature: float
) -> tuple[float, ...]:
    logits = model(input_ids=torch.tensor([[*prompt, *answer]])).logits[0].float()
    logps = torch.log_softmax(logits / temperature, dim=1)
    return tuple(float(logps[len(prompt) - 1 + i, token]) for i, token in enumerate(answer))


def scorer_of(model: PreTrainedModel, **options: int) -> PolicyScorer:
    return PolicyScorer(Policy(model.eval(), tiny_tokenizer(), torch.device("cpu")), Version(0, 1), **options)


def differences(found: list[list[tuple[float, ...]]], expected: list[list[tuple[float, ...]]]) -> list[float]:
    return [
        abs(a - b)
        for ours, theirs in zip(found, expected, strict=True)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    ]


@pytest.mark.parametrize("tokens_per_batch", [1, 36, 8192])
@pytest.mark.parametrize("tokens_per_call", [1, 20, 8192])
@pytest.mark.parametrize("model", PACKED, ids=lambda model: model.config.model_type)
def test_a_packed_response_has_the_logps_that_it_has_alone(model, tokens_per_call, tokens_per_batch):
    scorer = scorer_of(model, tokens_per_batch=tokens_per_batch)
    scorer.tokens_per_call = tokens_per_call
    scored = scorer.token_logps(PROMPTS, RESPONSES, temperature=0.7)
    assert scorer.packs
    assert max(differences(scored, by_hand(model, 0.7))) < 1e-5
    packed = PolicyScorer(scorer.policy, Version(0, 1)).token_logps(PROMPTS, RESPONSES, temperature=0.7)
    assert max(differences(scored, packed)) < 1e-5


@pytest.mark.parametrize("model", PACKED, ids=lambda model: model.config.model_type)
def test_packed_in_double_precision_it_is_the_same_but_for_the_last_digits(model):
    model = copy.deepcopy(model).double().eval()
    with torch.no_grad():
        expected = [
            torch.log_softmax(model(input_ids=torch.tensor([[*group.prompt, *answer]])).logits[0], dim=1)[
                range(len(group.prompt) - 1, len(group.prompt) + len(answer) - 1), answer
            ]
            for group in GROUPS
            for answer in group.responses
        ]
    found = packed_logps(model, GROUPS, temperature=1.0, tokens_per_call=64)
    assert [list(logps) for logps in found] == [pytest.approx(logps.tolist(), abs=1e-9) for logps in expected]


def test_in_bfloat16_packed_and_padded_are_as_far_from_float32_as_each_other():
    model = tiny_llama()
    expected = by_hand(model, 1.0)
    scorer = scorer_of(copy.deepcopy(model).bfloat16())
    away = []
    for scorer.packs in (True, False):
        found = differences(scorer.token_logps(PROMPTS, RESPONSES, temperature=1.0), expected)
        away.append(sum(found) / len(found))
    assert 0 < away[0] < 2 * away[1]


@pytest.mark.parametrize("model", PADDED, ids=lambda model: type(model).__name__)
def test_a_model_that_cannot_be_packed_is_scored_all_the_same(model):
    scorer = scorer_of(model)
    scored = scorer.token_logps(PROMPTS, RESPONSES, temperature=0.7)
    assert not scorer.packs
    assert max(differences(scored, by_hand(model, 0.7))) < 1e-5


def test_a_prompt_is_read_once_and_the_last_token_of_a_response_never():
    model, seen = tiny_llama(), []
    model.model.embed_tokens.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0].tolist()))
    packed_logps(model, [Group((4, 5, 6), [(7, 8), (9,), (10, 11, EOS_ID)])], temperature=1.0, tokens_per_call=64)
    assert seen == [[[4, 5, 6, 7, 10, 11]]]


@pytest.mark.parametrize("tokens_per_call", [1, 20, 60])
def test_a_call_of_attention_has_no_more_keys_with_padding_than_it_may_or_is_of_one_sequence(
    monkeypatch, tokens_per_call
):
    shapes = [key.shape for key, _ in calls_of_attention(monkeypatch, GROUPS, tokens_per_call)]
    assert shapes and all(shape[0] * shape[2] <= tokens_per_call or shape[0] == 1 for shape in shapes)


def test_a_long_response_needs_no_mask_of_all_its_tokens_by_all(monkeypatch):
    calls = calls_of_attention(monkeypatch, [Group((4, 5, 6), [tuple(range(10, 60))])], 8192)
    assert calls and all(mask is None for _, mask in calls)


def calls_of_attention(monkeypatch, groups: list[Group], tokens_per_call: int) -> list[tuple]:
    """Keys and mask of each."""
    attend, calls = nn.functional.scaled_dot_product_attention, []

    def seen(query, key, value, *, attn_mask, **options):
        calls.append((key, attn_mask))
        return attend(query, key, value, attn_mask=attn_mask, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", seen)
    packed_logps(tiny_llama(), groups, temperature=1.0, tokens_per_call=tokens_per_call)
    return calls


def test_the_model_attends_afterwards_as_it_did_before():
    model = tiny_llama()
    tokens = torch.tensor([[4, 5, 6]])
    before, kind = model(input_ids=tokens).logits, model.config._attn_implementation
    packed_logps(model, GROUPS, temperature=1.0, tokens_per_call=64)
    assert model.config._attn_implementation == kind
    assert torch.equal(model(input_ids=tokens).logits, before)


@pytest.mark.parametrize("most", [1, 6, 8, 36, 10**6])
def test_rows_have_all_responses_in_order_and_no_more_tokens_than_they_may(most):
    packed = list(rows(GROUPS, most))
    assert [(part.prompt, answer) for row in packed for part in row for answer in part.responses] == [
        (group.prompt, answer) for group in GROUPS for answer in group.responses
    ]
    for row in packed:
        assert sum(part.read for part in row) <= most or sum(len(part.responses) for part in row) == 1


def test_a_group_that_fits_a_row_is_not_split():
    groups = [Group((4,) * 5, [(5, 6), (7, 8, 9)])] * 3
    assert [len(row) for row in rows(groups, 20)] == [2, 1]
    assert [len(row) for row in rows(groups, 8)] == [1, 1, 1]


def test_a_response_of_no_tokens_has_none():
    assert scorer_of(tiny_llama()).token_logps(PROMPTS[:2], [[response()], []], temperature=1.0) == [[()], []]


def test_a_prompt_of_no_tokens_is_refused():
    assert can_pack(tiny_llama())
    with pytest.raises(DataError, match="a prompt needs at least 1 token, got 0"):
        packed_logps(tiny_llama(), [Group((), [(4,)])], temperature=1.0, tokens_per_call=64)
