import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaForCausalLM,
    PhiConfig,
    PhiForCausalLM,
)

from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import EOS_ID, PAD_ID, response_logps, tiny_llama, trajectory
from tba.batches import logprobs
from tba.batches.batching import collate, pad
from tba.batches.logprobs import chosen_logps, token_logps
from tba.objectives import trajectory_balance

PROMPTS = [(4, 5, 6), (7,), (8, 9)]
RESPONSES = [(10, EOS_ID), (11, 12, 13, 14), (15,)]
ROWS = pad(PROMPTS, RESPONSES, pad_id=PAD_ID)


def by_hand(model: torch.nn.Module, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float) -> Tensor:
    """Return the token log-probabilities of one sequence, from the logits of all positions."""
    logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0]
    logps = torch.log_softmax(logits / temperature, dim=-1)
    return torch.stack([logps[len(prompt) + i - 1, token] for i, token in enumerate(response)])


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_token_logps_are_those_of_each_sequence_alone_at_the_temperature(temperature):
    model = tiny_llama().double()
    logps_BT = token_logps(model, ROWS.tokens_BT, ROWS.response_mask_BT, temperature=temperature)
    assert logps_BT.shape == ROWS.tokens_BT.shape
    assert (logps_BT[~ROWS.response_mask_BT] == 0).all()
    for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
        expected = by_hand(model, prompt, response, temperature)
        torch.testing.assert_close(logps_BT[row][ROWS.response_mask_BT[row]], expected, rtol=1e-10, atol=1e-10)


def cut(monkeypatch: pytest.MonkeyPatch, *, kept_bytes: int = logprobs.KEPT_BYTES, **sizes: int) -> None:
    """Let the output layer compute in pieces of these sizes."""
    monkeypatch.setattr(logprobs, "ON_CPU", logprobs.ON_CPU._replace(**sizes))
    monkeypatch.setattr(logprobs, "KEPT_BYTES", kept_bytes)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("pieces", "summed"), [(1, 1), (4, 8), (4, 1), (4, 3)])
def test_under_autocast_they_are_those_of_the_plain_expression(
    monkeypatch: pytest.MonkeyPatch, tied: bool, pieces: int, summed: int
):
    """The results are bit-identical if the gradients of all rows are multiplied at once. Otherwise sums over pieces are
    computed in float32, and the plain expression rounds to bfloat16 once, by less than one part in 2^8."""
    model = tiny_llama(tied=tied)
    mask_N = ROWS.response_mask_BT[:, 1:]
    projected = -(-int(mask_N.sum()) // pieces) * model.config.vocab_size
    cut(monkeypatch, projected=projected, summed=summed)
    given: dict[str, Any] = {"input_ids": ROWS.tokens_BT[:, :-1], "use_cache": False}
    tokens_N = ROWS.tokens_BT[:, 1:][mask_N]
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**given).logits[mask_N]
        found_N = logprobs.logps_at(model, mask_N, tokens_N, temperature=0.7, input_ids=given["input_ids"])
    expected_N = torch.log_softmax(logits.float() / 0.7, dim=-1).gather(-1, tokens_N[:, None])[:, 0]
    assert found_N.dtype == torch.float32 and found_N.equal(expected_N)
    weights_N = torch.linspace(-1, 2, len(tokens_N))
    gradients = [torch.autograd.grad((it * weights_N).sum(), list(model.parameters())) for it in (found_N, expected_N)]
    for found, expected in zip(*gradients, strict=True):
        assert (found - expected).norm() <= (0.0 if pieces <= summed else 2.0**-8) * expected.norm()


SMALL = {"vocab_size": 78, "bos_token_id": None, "eos_token_id": 1}
LAYERS = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


HEADS = {"num_key_value_heads": 2, "head_dim": 8}


class WritesToLogits(LlamaForCausalLM):
    def forward(self, *inputs: Any, **options: Any) -> Any:
        output = super().forward(*inputs, **options)
        output.logits.mul_(2)
        return output


MODELS = [
    tiny_llama(tied=True),
    tiny_llama(tied=False),
    GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, initializer_range=0.3, **SMALL)),
    GPTNeoXForCausalLM(GPTNeoXConfig(initializer_range=0.3, **LAYERS, **SMALL)),
    PhiForCausalLM(PhiConfig(initializer_range=0.3, **LAYERS, **SMALL)),  # has biases
    Gemma2ForCausalLM(Gemma2Config(initializer_range=0.3, **HEADS, **LAYERS, **SMALL)),  # caps
    GraniteForCausalLM(GraniteConfig(initializer_range=0.3, logits_scaling=3.0, **LAYERS, **SMALL)),  # divides
    WritesToLogits(tiny_llama().config),
]
PIECES = {
    "all kept": {},
    "in pieces": {"projected": 4 * 78, "normalised": 3 * 78},
    "some kept": {"projected": 3 * 78, "kept_bytes": 4 * 78 * 8},
    "none kept": {"projected": 2 * 78, "normalised": 1, "kept_bytes": 0},
}


def gradients(model: torch.nn.Module, value: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    value.backward()
    return {name: it.grad.clone() for name, it in model.named_parameters() if it.grad is not None}


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_any_causal_model_has_its_values_and_gradients_and_keeps_what_it_does_to_logits(model, pieces, monkeypatch):
    cut(monkeypatch, **PIECES[pieces])
    model = copy.deepcopy(model).eval().double()
    if isinstance(model, PhiForCausalLM):
        model.lm_head.bias.data.normal_(generator=torch.Generator().manual_seed(0))
    expected = [by_hand(model, p, r, temperature=0.7) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    weights_N = torch.randn(sum(map(len, RESPONSES)), generator=torch.Generator().manual_seed(1)).double()
    by_parameter = gradients(model, torch.cat(expected) @ weights_N)
    for again in range(2):  # again, after the first call has found out what the model does
        with torch.inference_mode(mode=again == 1):
            logps_BT = token_logps(model, ROWS.tokens_BT, ROWS.response_mask_BT, temperature=0.7)
        found = logps_BT[ROWS.response_mask_BT]
        torch.testing.assert_close(found, torch.cat(expected), rtol=1e-8, atol=1e-8)
        if again == 0:
            torch.testing.assert_close(gradients(model, found @ weights_N), by_parameter, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_what_a_model_does_to_logits_is_kept_without_gradients_too(model):
    """No call with gradients comes before."""
    model = copy.deepcopy(model).eval().double()
    with torch.inference_mode():
        logps_BT = token_logps(model, ROWS.tokens_BT, ROWS.response_mask_BT, temperature=1.0)
    expected = [by_hand(model, p, r, temperature=1.0) for p, r in zip(PROMPTS, RESPONSES, strict=True)]
    torch.testing.assert_close(logps_BT[ROWS.response_mask_BT], torch.cat(expected), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize(
    ("dtype", "precise", "times"), [(torch.bfloat16, torch.float32, 1.2), (torch.float32, torch.float64, 1.5)]
)
def test_values_and_gradients_are_as_close_to_a_more_precise_type_as_the_plain_expressions(
    dtype, precise, times, pieces, monkeypatch
):
    """In float32, a sum of many small pieces rounds more often."""
    cut(monkeypatch, **PIECES[pieces])
    generator = torch.Generator().manual_seed(0)
    rows, found = pad([(4, 5)] * 40, [tuple(torch.randint(78, (20,), generator=generator).tolist())] * 40, pad_id=0), {}
    low = tiny_llama(tied=False).to(dtype)
    for form in ("exact", "plain", "ours"):
        model = copy.deepcopy(low).to(precise) if form == "exact" else low
        if form == "ours":
            logp_BT = token_logps(model, rows.tokens_BT, rows.response_mask_BT, temperature=1.0)[:, 1:]
        else:
            logits_BTV = model(input_ids=rows.tokens_BT[:, :-1]).logits
            logps_BTV = torch.log_softmax(logits_BTV.to(precise if form == "exact" else torch.float32), dim=2)
            logp_BT = logps_BTV.gather(2, rows.tokens_BT[:, 1:, None])[:, :, 0] * rows.response_mask_BT[:, 1:]
        found[form] = {"value": logp_BT.detach(), **gradients(model, logp_BT.sum())}
    for name, expected in found["exact"].items():
        away = {form: float((found[form][name].to(precise) - expected).norm()) for form in ("plain", "ours")}
        assert away["ours"] <= times * away["plain"], name
        assert found["ours"][name].dtype == found["plain"][name].dtype


class Largest(TorchDispatchMode):
    """Records the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for it in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(it, Tensor):
                self.elements = max(self.elements, it.numel())
        return out


@pytest.mark.parametrize("pieces", ["some kept", "none kept"])
def test_logits_of_all_positions_are_never_there_at_once(pieces, monkeypatch):
    cut(monkeypatch, **PIECES[pieces])
    model, rows = tiny_llama(), pad([(4, 5)] * 8, [(6,) * 20] * 8, pad_id=PAD_ID)
    saved: list[Tensor] = []
    with Largest() as largest, saved_tensors_hooks(lambda it: saved.append(it) or it, lambda it: it):
        token_logps(model, rows.tokens_BT, rows.response_mask_BT, temperature=1.0).sum().backward()
    assert 0 < largest.elements < 8 * 20 * 78
    weight = model.lm_head.weight.data_ptr()
    kept = sum(it.nbytes for it in saved if it.shape[-1:] == (78,) and it.data_ptr() != weight)
    assert kept <= logprobs.KEPT_BYTES and (kept > 0) is (logprobs.KEPT_BYTES > 0)


class WithoutOutputLayer(torch.nn.Module):
    """A causal model that does not give access to its output layer."""

    def __init__(self):
        super().__init__()
        self.inner = tiny_llama().double()

    def get_output_embeddings(self) -> None:
        return None

    def forward(self, **inputs):
        return self.inner(**inputs)


def test_a_model_without_a_known_output_layer_falls_back_to_all_logits():
    model = WithoutOutputLayer()
    fallback = token_logps(model, ROWS.tokens_BT, ROWS.response_mask_BT, temperature=1.0)
    expected = token_logps(model.inner, ROWS.tokens_BT, ROWS.response_mask_BT, temperature=1.0)
    torch.testing.assert_close(fallback, expected)


def test_only_positions_that_predict_a_response_token_reach_the_vocabulary():
    model, seen = tiny_llama(), []
    model.lm_head.register_forward_hook(lambda _, inputs, output: seen.append(output.shape))
    token_logps(model, ROWS.tokens_BT, ROWS.response_mask_BT, temperature=1.0)
    assert seen == [(1, sum(map(len, RESPONSES)), model.config.vocab_size)]


def test_the_model_is_left_as_it_was():
    model = tiny_llama()
    token_logps(model, ROWS.tokens_BT, ROWS.response_mask_BT, temperature=1.0)
    assert model(input_ids=ROWS.tokens_BT).logits.shape == (*ROWS.tokens_BT.shape, model.config.vocab_size)


# --- Padding ---


@pytest.mark.parametrize("filler", [PAD_ID, EOS_ID, 42])
def test_more_padding_and_other_filler_change_nothing(filler):
    model = tiny_llama().double()
    plain = token_logps(model, ROWS.tokens_BT, ROWS.response_mask_BT, temperature=1.0)
    rows = pad([*PROMPTS, (4,) * 9], [*RESPONSES, (5,) * 9], pad_id=filler)
    padded = token_logps(model, rows.tokens_BT, rows.response_mask_BT, temperature=1.0)[:3]
    torch.testing.assert_close(padded[:, : plain.shape[1]], plain, rtol=1e-10, atol=1e-10)
    assert (padded[:, plain.shape[1] :] == 0).all()


def test_left_padding_changes_nothing_given_an_attention_mask():
    model = tiny_llama().double()
    plain = token_logps(model, ROWS.tokens_BT, ROWS.response_mask_BT, temperature=1.0)
    lengths = torch.tensor(ROWS.lengths)
    shifts = [int(lengths.max()) + 2 - n for n in ROWS.lengths]
    wide = torch.nn.functional.pad(ROWS.tokens_BT, (0, 2), value=PAD_ID)
    mask = torch.nn.functional.pad(ROWS.response_mask_BT, (0, 2))
    attention = torch.arange(wide.shape[1]) < lengths[:, None]
    rolled = [
        torch.stack([row.roll(shift) for row, shift in zip(tensor, shifts, strict=True)])
        for tensor in (wide, mask, attention)
    ]
    left = token_logps(model, rolled[0], rolled[1], temperature=1.0, attention_mask_BT=rolled[2])
    torch.testing.assert_close(left.sum(1), plain.sum(1), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("fill", [0.0, 1.0])
def test_whatever_masked_positions_hold_cancels_in_the_loss(fill):
    """Policy and reference are masked alike, so a fill other than this package's 0 gives the same loss."""
    policy, reference = tiny_llama(seed=1).double(), tiny_llama(seed=2).double()
    rows = pad([(4, 5)] * 3, RESPONSES, pad_id=PAD_ID)
    reward_PK = torch.tensor([[1.0, 0.0, 0.5]], dtype=torch.float64)
    logps = [token_logps(m, rows.tokens_BT, rows.response_mask_BT, temperature=1.0) for m in (policy, reference)]
    filled = [logps_BT.masked_fill(~rows.response_mask_BT, fill) for logps_BT in logps]
    losses = [trajectory_balance(a.sum(1)[None], b.sum(1)[None], reward_PK, beta=0.5).value for a, b in (logps, filled)]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-12, atol=0)


# --- The EOS rule ---


@pytest.mark.parametrize("include_eos", [True, False])
def test_a_stored_sum_and_a_recomputed_one_count_the_same_tokens(include_eos):
    """If the policy is its own reference, every log-ratio is zero for each rule and each kind of end of a response."""
    model = tiny_llama()
    responses = [(10, 11, EOS_ID), (10, 11, 12), (EOS_ID,), (*[13] * 127, EOS_ID)]
    rows = pad([(4, 5)] * 4, responses, pad_id=PAD_ID)
    with torch.no_grad():
        logps = token_logps(model, rows.tokens_BT, rows.response_mask_BT, temperature=0.7)
    trajectories = [
        trajectory(
            prompt_tokens=(4, 5),
            response_tokens=response,
            ref_logps=tuple(logps[row][rows.response_mask_BT[row]].tolist()),
            behaviour_logps=tuple((logps[row][rows.response_mask_BT[row]] - 0.5).tolist()),
        )
        for row, response in enumerate(responses)
    ]
    batch = collate(
        fetched_of(trajectories), responses_per_prompt=4, pad_id=PAD_ID, include_eos=include_eos, by_token=True
    )
    logp_B = response_logps(model, batch, temperature=0.7)
    torch.testing.assert_close(logp_B, batch.ref_logp_B, rtol=1e-5, atol=1e-5)
    logp_BT = token_logps(model, batch.tokens_BT, batch.response_mask_BT, temperature=0.7)
    torch.testing.assert_close(logp_BT, batch.ref_logp_BT, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logp_BT - 0.5 * batch.response_mask_BT, batch.behaviour_logp_BT, rtol=1e-5, atol=1e-5)
    assert (float(logp_B.detach()[2]) == 0) is (not include_eos)  # no token of it counts


def test_a_batch_of_nothing_but_empty_responses_has_zero_logps():
    trajectories = [trajectory(response_tokens=(EOS_ID,))] * 2
    batch = collate(fetched_of(trajectories), responses_per_prompt=2, pad_id=PAD_ID, include_eos=False)
    logp_B = response_logps(tiny_llama(), batch, temperature=1.0)
    assert logp_B.tolist() == [0.0, 0.0]
    logp_B.sum().backward()


# --- Temperature and precision ---


def test_chosen_logps_are_log_softmax_of_logits_over_temperature():
    logits_NV = torch.randn(5, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens_N = torch.tensor([0, 3, 6, 6, 1])
    expected = torch.log_softmax(logits_NV / 0.7, dim=1)[torch.arange(5), tokens_N]
    torch.testing.assert_close(chosen_logps(logits_NV, tokens_N, temperature=0.7), expected)


@pytest.mark.parametrize("vocabulary", [11, 2**19])
def test_chosen_logps_have_the_gradient_of_log_softmax_however_many_rows_fit_a_piece(vocabulary):
    generator = torch.Generator().manual_seed(0)
    logits_NV = torch.randn(5, vocabulary, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens_N = torch.tensor([0, 3, vocabulary - 1, vocabulary - 1, 1])
    weights_N = torch.randn(5, generator=generator, dtype=torch.float64)
    plain = torch.log_softmax(logits_NV / 1.3, dim=1)[torch.arange(5), tokens_N]
    (expected,) = torch.autograd.grad(plain @ weights_N, logits_NV)
    logp_N = chosen_logps(logits_NV, tokens_N, temperature=1.3)
    torch.testing.assert_close(logp_N, plain)
    (actual,) = torch.autograd.grad(logp_N @ weights_N, logits_NV)
    torch.testing.assert_close(actual, expected)


def test_logps_of_low_precision_logits_are_computed_in_float32():
    logits_NV = torch.tensor([[8.0, 8.0, 1.0]], dtype=torch.bfloat16, requires_grad=True)
    logp_N = chosen_logps(logits_NV, torch.tensor([0]), temperature=1.0)
    assert logp_N.dtype == torch.float32
    torch.testing.assert_close(logp_N, torch.log_softmax(logits_NV.float(), dim=1)[:, 0])
    logp_N.sum().backward()
    assert logits_NV.grad is not None and logits_NV.grad.dtype == torch.bfloat16


def test_the_temperature_a_response_was_sampled_at_does_not_enter_the_loss():
    def loss(sampled_at: float) -> Tensor:
        rows = [trajectory(temperature=sampled_at, reward=reward) for reward in (0.0, 1.0)]
        batch = collate(fetched_of(rows), responses_per_prompt=2, pad_id=PAD_ID, include_eos=True)
        logp_PK = response_logps(tiny_llama(), batch, temperature=0.7)[None]
        return trajectory_balance(logp_PK, batch.ref_logp_B[None], batch.reward_B[None], beta=0.5).value

    assert loss(0.3) == loss(1.9)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_temperature_must_be_positive(temperature):
    with pytest.raises(ValueError, match=f"temperature must be positive, got {temperature}"):
        chosen_logps(torch.zeros(1, 2), torch.tensor([0]), temperature=temperature)
