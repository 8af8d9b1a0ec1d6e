"""Attention of a whole row at once. The kernel needs a GPU, so here stands a function that computes what torch's source
says of the kernel: flash_api.cpp for what it demands, and FlashAttention's masks, which are aligned at the lower right
(`torch.nn.attention.bias` says so of the same kernel)."""

import copy
import inspect
from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import varlen_attn
from transformers import MistralConfig, MistralForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from benchmarks.harness.tiny_models import tiny_llama, tiny_tokenizer
from tba.batches import unpadded_attention
from tba.batches.packing import Group, Row, attending, packed_logps, row_logps, why_attention_pads
from tba.batches.unpadded_attention import around, attend_at_once, formula, kind_of, sequences_of, why_not
from tba.models.policy import Policy
from tba.models.pretrained import computing
from tba.presets import preset
from tba.train import learner

SPANS = [(range(0), range(4)), (range(4), range(4, 7)), (range(4), range(7, 8)), (range(0), range(8, 10))]
"""A prompt of four tokens with responses of three and one, and a prompt of two."""
GROUPS = [Group((4, 5, 6), [tuple(range(10, 40)), (7,), (10, 11, 1)]), Group((7,), [(8, 9)])]
SIZES: dict[str, Any] = {
    "vocab_size": 78, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3,
}  # fmt: skip
MODELS = [
    tiny_llama(),
    Qwen3ForCausalLM(Qwen3Config(**SIZES)),
    MistralForCausalLM(MistralConfig(sliding_window=4, **SIZES)),
    MistralForCausalLM(MistralConfig(sliding_window=1, **SIZES)),
]


def kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    upper_left: bool = False,
) -> Tensor:
    """Return what the kernel returns, and raise what it raises."""
    (_, heads, size), (keys, shared, _) = query.shape, key.shape
    assert key.shape == value.shape == (keys, shared, size) and heads % shared == 0 and (enable_gqa or heads == shared)
    assert query.dtype == key.dtype == value.dtype and all(it.stride(-1) == 1 for it in (query, key, value))
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q.shape == cu_seq_k.shape
    if size % 8:
        raise RuntimeError("head_size must be a multiple of 8, this is ensured by padding!\nException raised from ...")
    left, right = window_size
    out, (begins_q, begins_k) = list[Tensor](), (cu_seq_q.tolist(), cu_seq_k.tolist())
    assert begins_q[0] == begins_k[0] == 0 and begins_q[-1] == len(query) and begins_k[-1] == keys
    for q, to_q, k, to_k in zip(begins_q, begins_q[1:], begins_k, begins_k[1:], strict=False):
        assert 0 < to_q - q <= max_q and 0 < to_k - k <= max_k
        row_Q1, column_K = torch.arange(to_q - q)[:, None], torch.arange(to_k - k)
        own_Q1 = row_Q1 if upper_left else row_Q1 + (to_k - k) - (to_q - q)
        sees_QK = torch.ones(to_q - q, to_k - k, dtype=torch.bool)
        if right >= 0:
            sees_QK &= column_K <= own_Q1 + right
        if left >= 0:
            sees_QK &= column_K >= own_Q1 - left
        keys_HKD, values_HKD = (
            it[k:to_k].repeat_interleave(heads // shared, dim=1).transpose(0, 1) for it in (key, value)
        )
        score_HQK = scale * query[q:to_q].transpose(0, 1) @ keys_HKD.transpose(1, 2)
        out.append((score_HQK.masked_fill(~sees_QK, -torch.inf).softmax(dim=2) @ values_HKD).transpose(0, 1))
    return torch.cat(out)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """The kernel that stands here is used on the CPU, in double precision."""
    monkeypatch.setattr(unpadded_attention, "DEVICES", {"cpu"})
    monkeypatch.setattr(unpadded_attention, "DTYPES", {torch.float64, torch.bfloat16})
    monkeypatch.setattr(unpadded_attention, "varlen_attn", kernel)
    why_not.cache_clear()
    yield monkeypatch
    why_not.cache_clear()


# --- The kernel of the torch that is installed ------------------------------------------------------------------------


def test_the_kernel_takes_what_it_is_given():
    """A torch that changes it must be read again: alignment, windows, types and the backward pass."""
    parameters = inspect.signature(varlen_attn).parameters.values()
    given = ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert [it.name for it in parameters if it.default is it.empty] == given
    named = {it.name: it.default for it in parameters if it.kind is it.KEYWORD_ONLY}
    assert named == {
        "return_aux": None, "scale": None, "window_size": (-1, -1), "enable_gqa": False, "seqused_k": None,
        "block_table": None, "num_splits": None,
    }  # fmt: skip
    told = " ".join((varlen_attn.__doc__ or "").split())
    assert "Use (-1, -1) for full attention (default), (-1, 0) for causal attention, or (W, 0) for causal" in told
    forward, backward = (
        str(it.default._schema)
        for it in (torch.ops.aten._flash_attention_forward, torch.ops.aten._flash_attention_backward)
    )
    for schema in (forward, backward):
        assert "cum_seq_q" in schema and "window_size_left" in schema and "window_size_right" in schema


def rows_of(device: str, size: int = 8, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    shapes = [(10, 4, size), (10, 2, size), (10, 2, size)]
    query, key, value = (torch.empty(shape, dtype=torch.bfloat16, device=device, **options) for shape in shapes)
    return query, key, value


@pytest.mark.parametrize("window", [None, 3])
def test_on_fake_tensors_of_a_gpu_the_kernel_returns_a_vector_for_each_query(window: int | None):
    with FakeTensorMode(), torch.no_grad():  # a build for CPUs has no gradients there
        out = attend_at_once(*rows_of("cuda"), sequences_of(SPANS, torch.device("cuda")), window, 0.3)
    assert out.shape == (10, 4, 8) and out.dtype == torch.bfloat16 and out.device.type == "cuda"


def test_the_kernel_has_a_backward_pass():
    inputs = rows_of("meta", requires_grad=True)
    attend_at_once(*inputs, sequences_of(SPANS, torch.device("meta")), 3, 0.3).sum().backward()
    assert all(it.grad is not None and it.grad.shape == it.shape for it in inputs)


# --- From a row to sequences ------------------------------------------------------------------------------------------


def test_a_response_has_its_own_queries_and_the_keys_of_its_prompt_and_itself():
    found = sequences_of(SPANS, torch.device("cpu"))
    assert found.keys_K.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 7, 8, 9]
    assert found.queries_before_S1.tolist() == [0, 4, 7, 8, 10]
    assert found.keys_before_S1.tolist() == [0, 4, 11, 16, 18]
    assert (found.most_queries, found.most_keys) == (4, 7)


def test_a_window_counts_the_token_itself_and_the_kernel_only_those_before():
    assert [around(window, 7) for window in (None, 1, 2, 6, 7, 8)] == [
        (-1, 0), (0, 0), (1, 0), (5, 0), (-1, 0), (-1, 0),
    ]  # fmt: skip


def seen_by(place: int, window: int | None) -> list[int]:
    """Return the places that the token at this place of `SPANS` sees."""
    before, own = next(span for span in SPANS if place in span[1])
    seen = [*before, *(it for it in own if it <= place)]
    return seen if window is None else seen[-window:]


@pytest.mark.parametrize("window", [None, 1, 2, 5, 7])
def test_values_and_gradients_are_those_of_each_token_alone(on_cpu, window: int | None):
    random = torch.Generator().manual_seed(0)
    given = [torch.randn(10, heads, 8, generator=random, dtype=torch.float64) for heads in (4, 2, 2)]
    weights = torch.randn(10, 4, 8, generator=random, dtype=torch.float64)

    def found(way: str) -> list[Tensor]:
        query, key, value = inputs = [it.clone().requires_grad_() for it in given]
        if way == "kernel":
            out = attend_at_once(query, key, value, sequences_of(SPANS, query.device), window, 0.3)
        elif way == "formula":
            out = formula(query, key, value, SPANS, window, 0.3)
        else:
            out = torch.stack([alone(query, key, value, place, seen_by(place, window)) for place in range(10)])
        (out * weights).sum().backward()
        return [out.detach(), *(it.grad for it in inputs if it.grad is not None)]

    for way in ("kernel", "formula"):
        for ours, exact in zip(found(way), found("alone"), strict=True):
            torch.testing.assert_close(ours, exact, rtol=1e-12, atol=1e-12)


def alone(query: Tensor, key: Tensor, value: Tensor, place: int, seen: list[int]) -> Tensor:
    """Return [4, 8]: attention of the token at this place. Two heads of queries share a head of keys."""
    weights = [(0.3 * key[seen, head // 2] @ query[place, head]).softmax(dim=0) for head in range(4)]
    return torch.stack([weight @ value[seen, head // 2] for head, weight in enumerate(weights)])


def test_the_gradient_of_a_prompt_is_summed_over_its_responses_in_float32(on_cpu):
    """In bfloat16, adding 1 to 256 changes nothing."""
    spans = [(range(0), range(1)), *((range(1), range(i, i + 1)) for i in range(1, 1001))]
    query, key, value = (torch.zeros(1001, 1, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    attend_at_once(query, key, value, sequences_of(spans, query.device), None, 0.3).sum().backward()
    assert value.grad is not None and float(value.grad[0, 0, 0]) == pytest.approx(501, rel=2**-8)


# --- Models -----------------------------------------------------------------------------------------------------------


def in_one_call(model: PreTrainedModel) -> bool:
    """True if attention reads a row at once."""
    row = Row.of(GROUPS, 512, model.device)
    with attending(model, row), torch.no_grad():
        model(input_ids=row.tokens_1N, position_ids=row.positions_1N, use_cache=False)
    return not row.pads_because


@pytest.mark.parametrize("model", MODELS, ids=["llama", "qwen3", "window of 4", "window of 1"])
def test_a_model_has_the_values_and_gradients_that_it_has_with_padded_calls(on_cpu, model):
    model = copy.deepcopy(model).double().eval()

    def found() -> dict[str, Tensor]:
        model.zero_grad()
        logps = row_logps(model, GROUPS, temperature=0.7, tokens_per_call=20)
        (logps * torch.linspace(-1, 2, len(logps))).sum().backward()
        gradients = {name: it.grad.clone() for name, it in model.named_parameters() if it.grad is not None}
        return {"": logps.detach(), **gradients}

    assert in_one_call(model)
    ours = found()
    on_cpu.setattr(unpadded_attention, "DEVICES", set())
    why_not.cache_clear()
    assert not in_one_call(model)
    torch.testing.assert_close(ours, found(), rtol=1e-6, atol=1e-6)


def test_under_autocast_the_kernel_computes_in_bfloat16(on_cpu):
    model = tiny_llama().eval()
    expected = packed_logps(model, GROUPS, temperature=1.0, tokens_per_call=512)
    assert not in_one_call(model)
    with computing(model, "bfloat16"):
        assert in_one_call(model)
        found = packed_logps(model, GROUPS, temperature=1.0, tokens_per_call=512)
    away = [abs(a - b) for ours, theirs in zip(found, expected, strict=True) for a, b in zip(ours, theirs, strict=True)]
    assert 0 < sum(away) / len(away) < 0.05


def test_a_layer_calls_the_kernel_once_for_all_groups_of_a_row(on_cpu):
    calls = list[int]()

    def counted(query: Tensor, *given: Any, **options: Any) -> Tensor:
        calls.append(len(query))
        return kernel(query, *given, **options)

    model = tiny_llama().double().eval()
    assert in_one_call(model)
    on_cpu.setattr(unpadded_attention, "varlen_attn", counted)
    packed_logps(model, GROUPS, temperature=1.0, tokens_per_call=1)
    assert calls == [sum(group.read for group in GROUPS)] * model.config.num_hidden_layers


# --- Where the kernel cannot be used ----------------------------------------------------------------------------------


def kind(size: int = 8, dtype: torch.dtype = torch.float64, window: int | None = None) -> unpadded_attention.Kind:
    query, key, value = (it.to(dtype) for it in rows_of("cpu", size))
    return kind_of(query, key, value, window)


def test_a_kernel_that_computes_what_is_expected_is_used(on_cpu):
    assert why_not(kind()) == why_not(kind(window=4)) == why_not(kind(dtype=torch.bfloat16)) == ""


def test_a_kernel_is_used_only_for_its_devices_and_number_formats():
    assert why_not(kind(dtype=torch.bfloat16)) == "the kernel is not for a device of type cpu"


def test_a_kernel_that_refuses_says_why_in_a_line(on_cpu):
    assert why_not(kind(dtype=torch.float32)) == "the kernel does not compute in float32"
    expected = "the kernel refuses: head_size must be a multiple of 8, this is ensured by padding!"
    assert why_not(kind(size=12)) == expected
    on_cpu.setattr(unpadded_attention, "varlen_attn", lambda query: query)
    why_not.cache_clear()
    assert "unexpected keyword argument" in why_not(kind())
    on_cpu.setattr(unpadded_attention, "varlen_attn", None)
    why_not.cache_clear()
    assert why_not(kind()) == f"torch {torch.__version__} does not have the kernel"


def test_values_of_another_size_than_keys_are_not_given_to_the_kernel(on_cpu):
    query, key, value = (it.double() for it in rows_of("cpu"))
    assert "keys have 8 numbers in a head and values 4" in why_not(kind_of(query, key, value[:, :, :4], None))


@pytest.mark.parametrize("fault", ["aligned at the upper left", "window", "not a number", "gradient"])
def test_a_kernel_with_other_results_is_not_used(on_cpu, fault: str):
    def wrong(query: Tensor, *given: Any, window_size: tuple[int, int], **options: Any) -> Tensor:
        if fault == "gradient":
            return kernel(query.detach() + 0 * query, *given, window_size=window_size, **options)
        wider = (window_size[0] + 1, 0) if fault == "window" else window_size
        out = kernel(query, *given, window_size=wider, upper_left="upper" in fault, **options)
        return out * torch.nan if fault == "not a number" else out

    on_cpu.setattr(unpadded_attention, "varlen_attn", wrong)
    assert why_not(kind(window=4)).startswith("the kernel is wrong by a share of ")


def test_a_lack_of_memory_is_no_reason_to_pad(on_cpu):
    def full(*given: Any, **options: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    on_cpu.setattr(unpadded_attention, "varlen_attn", full)
    with pytest.raises(torch.OutOfMemoryError):
        why_not(kind())


def test_a_model_whose_tensors_the_kernel_refuses_is_read_in_padded_calls(on_cpu):
    model = MistralForCausalLM(MistralConfig(**{**SIZES, "head_dim": 12})).double().eval()
    expected = packed_logps(model, GROUPS, temperature=1.0, tokens_per_call=512)
    assert not in_one_call(model)
    on_cpu.setattr(unpadded_attention, "DEVICES", set())
    why_not.cache_clear()
    assert packed_logps(model, GROUPS, temperature=1.0, tokens_per_call=512) == expected


def test_why_attention_pads_is_told_for_a_gpu_and_not_for_a_cpu(monkeypatch: pytest.MonkeyPatch):
    model = tiny_llama().bfloat16()
    assert why_attention_pads(model) == ""
    cast(Any, model).to("meta")
    assert why_attention_pads(model) == "the kernel is not for a device of type meta"


def test_a_learner_asks_in_the_number_format_in_which_it_trains(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(learner, "why_attention_pads", lambda model: str(torch.is_autocast_enabled("cpu")))
    for dtype, lowers in (("bfloat16", "True"), ("float32", "False")):
        policy = Policy(tiny_llama().eval(), tiny_tokenizer(), torch.device("cpu"))
        config = preset("quickstart").replace({"training.compute_dtype": dtype})
        assert learner.Learner(config, policy).attention_pads_because == lowers
