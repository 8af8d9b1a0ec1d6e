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
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    RobertaConfig,
    RobertaForCausalLM,
    ZayaConfig,
    ZayaForCausalLM,
)

from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import EOS_ID, PAD_ID, batch_logps, tiny_llama, tiny_tokenizer, trajectory
from tba.batches.batching import collate
from tba.batches.logprobs import token_logps
from tba.batches.packing import Group, can_pack, packed_logps, rows
from tba.errors import DataError
from tba.fetched import Fetched
from tba.models.policy import Policy, PolicyScorer
from tba.presets import preset
from tba.train.learner import Learner
from tba.types import Prompt, Response, Version

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
    MistralForCausalLM(MistralConfig(sliding_window=4, **HEADS, **WIDE, **LAYERS, **SMALL)),
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
    Llama4ForCausalLM(  # looks at chunks of 4 tokens, and does not tell its attention
        Llama4TextConfig(
            attention_chunk_size=4, num_local_experts=2, intermediate_size_mlp=64, **HEADS, **WIDE, **LAYERS, **SMALL
        )
    ),
    BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=4, **WIDE, **SMALL)),
    DogeForCausalLM(DogeConfig(**HEADS, **WIDE, **LAYERS, **SMALL)),
    ZayaForCausalLM(ZayaConfig(num_key_value_heads=2, **LAYERS, **SMALL)),
    RobertaForCausalLM(RobertaConfig(is_decoder=True, **WIDE, **LAYERS, **SMALL)),  # counts from behind its padding
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
    # Norms compute in single precision whatever the model's is: a last digit of that may differ.
    assert [list(logps) for logps in found] == [pytest.approx(logps.tolist(), abs=1e-6) for logps in expected]


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


def test_a_window_as_long_as_the_sequences_needs_no_mask_and_a_shorter_one_has_its_own(monkeypatch):
    groups = [Group((4, 5, 6), [tuple(range(10, 60))])]
    for window, masked in ((60, False), (20, True)):
        model = MistralForCausalLM(MistralConfig(sliding_window=window, **HEADS, **WIDE, **LAYERS, **SMALL)).eval()
        calls = calls_of_attention(monkeypatch, groups, 8192, model)
        assert any(mask is not None for _, mask in calls) is masked
        found = packed_logps(model, groups, temperature=1.0, tokens_per_call=8192)
        assert found[0] == pytest.approx(alone(model, groups[0].prompt, groups[0].responses[0], 1.0), abs=1e-5)


def test_a_long_response_needs_no_mask_of_all_its_tokens_by_all(monkeypatch):
    calls = calls_of_attention(monkeypatch, [Group((4, 5, 6), [tuple(range(10, 60))])], 8192)
    assert calls and all(mask is None for _, mask in calls)


def calls_of_attention(
    monkeypatch, groups: list[Group], tokens_per_call: int, model: PreTrainedModel | None = None
) -> list[tuple]:
    """Keys and mask of each."""
    attend, calls = nn.functional.scaled_dot_product_attention, []

    def seen(query, key, value, *, attn_mask, **options):
        calls.append((key, attn_mask))
        return attend(query, key, value, attn_mask=attn_mask, **options)

    with monkeypatch.context() as patch:
        patch.setattr(nn.functional, "scaled_dot_product_attention", seen)
        packed_logps(model or tiny_llama(), groups, temperature=1.0, tokens_per_call=tokens_per_call)
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


# --- What a trainer does ---


DRAWN = [
    ("a", (4, 5, 6), (10, EOS_ID), None),
    ("a", (4, 5, 6), tuple(range(10, 40)), None),
    ("b", (7,), (EOS_ID,), None),  # nothing of it counts without its end
    ("b", (7,), (15, EOS_ID, 30, 31, 16, EOS_ID), (True,) * 2 + (False,) * 2 + (True,) * 2),
    ("b", (7,), (11, 12, EOS_ID), None),
    ("b", (7,), (13, EOS_ID), None),
    ("c", (7, 8), (EOS_ID,), None),
    ("c", (7, 8), (EOS_ID,), None),
]  # fmt: skip


def drawn_rows() -> Fetched:
    """Groups of two, the third of the second's prompt too."""
    return fetched_of(
        [
            trajectory(
                prompt_id=prompt_id, prompt_tokens=prompt, response_tokens=tokens, reward=float(i % 2),
                **({"loss_mask": mask} if mask else {}),
            )
            for i, (prompt_id, prompt, tokens, mask) in enumerate(DRAWN)
        ]
    )  # fmt: skip


@pytest.mark.parametrize("include_eos", [True, False])
@pytest.mark.parametrize("model", PACKED, ids=lambda model: model.config.model_type)
def test_a_packed_batch_has_the_values_and_gradients_of_a_padded_one(model, include_eos):
    model = copy.deepcopy(model).double().eval()
    batch = collate(drawn_rows(), responses_per_prompt=2, pad_id=PAD_ID, include_eos=include_eos)
    padded = token_logps(model, batch.tokens_BT, batch.response_mask_BT, temperature=0.7)
    packed = batch_logps(model, batch, temperature=0.7)
    torch.testing.assert_close(packed, padded, rtol=1e-6, atol=1e-6)
    weights_BT = torch.randn(padded.shape, generator=torch.Generator().manual_seed(0)).double()
    expected, found = (gradients_of(model, (logp_BT * weights_BT).sum()) for logp_BT in (padded, packed))
    assert found.keys() == expected.keys()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def gradients_of(model: PreTrainedModel, value: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    value.backward()
    return {name: it.grad.clone() for name, it in model.named_parameters() if it.grad is not None}


def test_rows_of_a_group_that_do_not_begin_alike_are_read_apart():
    """As when nothing tells which of its tokens are the prompt."""
    model = tiny_llama().double()
    batch = collate(drawn_rows(), responses_per_prompt=2, pad_id=PAD_ID, include_eos=True)
    batch.tokens_BT[1, 0] = 9
    padded = token_logps(model, batch.tokens_BT, batch.response_mask_BT, temperature=1.0)
    torch.testing.assert_close(batch_logps(model, batch, temperature=1.0), padded, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("model", [tiny_llama(), PADDED[0], PADDED[-1]], ids=lambda model: type(model).__name__)
def test_a_trainer_packs_what_takes_it_and_steps_alike(model):
    seen: list[int] = []
    config = preset("quickstart").replace({"training.responses_per_prompt": 2, "training.groups_per_micro_batch": 3})
    policy = Policy(copy.deepcopy(model).double().eval(), tiny_tokenizer(), torch.device("cpu"))
    learner, other = Learner(config, policy), Learner(config, copy.deepcopy(policy))
    other.packs = False
    norms = [it.learn(1, it.collate(drawn_rows())).metrics["grad_norm"] for it in (learner, other)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[0] > 0
    policy.model.get_input_embeddings().register_forward_hook(lambda _, inputs, out: seen.append(inputs[0].numel()))
    batch = learner.collate(drawn_rows())
    learner.learn(2, batch)
    assert (sum(seen) < sum(batch.lengths)) is learner.packs is (type(model) is LlamaForCausalLM)
