"""Measures of perplexity on given log-probabilities: the tokens that each of them counts."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from benchmarks.harness.tiny_models import EOS_ID, tiny_policy
from tba.models.policy import PolicyScorer
from tba.tasks.tldr import diluted_perplexity, mean_log_ratio, perplexity
from tba.types import Prompt, Response, Version

MARKER = (7, 8)
POST = (1, 2, 3, 7, 8)  # ends with the marker


def said(tokens: tuple[int, ...]) -> Response:
    return Response(
        tokens=tokens, logps=(0.0,) * len(tokens), text="", finished=True, temperature=1.0, top_p=1.0, seed=0,
        version_start=Version(0, 1), version_end=Version(0, 1), generate_seconds=0.0,
    )  # fmt: skip


def test_the_diluted_perplexity_divides_what_the_response_costs_by_all_tokens_less_one():
    """Two tokens with probabilities 1/2 and 1/8 cost 4 log 2, over all tokens less one: 2 ** (4 / 6)."""
    logps = [math.log(1 / 2), math.log(1 / 8)]
    assert diluted_perplexity(POST, (4, 5), logps, MARKER) == pytest.approx(2 ** (4 / 6), rel=1e-12)
    assert perplexity([logps]) == pytest.approx(4.0, rel=1e-12)


def test_the_diluted_perplexity_is_what_a_language_models_loss_on_the_whole_text_gives():
    """The published form is one loss over the text, without labels up to the marker, divided by all positions."""
    policy = tiny_policy()
    prompt, response = (5, 9, 4, *MARKER), (11, 3, 12, EOS_ID)
    text = torch.tensor([*prompt, *response])
    labels = torch.where(torch.arange(len(text)) < len(prompt), -100, text)
    with torch.no_grad():
        logits = policy.model(text[None]).logits[0]
    loss = cross_entropy(logits[:-1], labels[1:], reduction="sum") / (len(text) - 1)
    scorer = PolicyScorer(policy, Version(0, 1))
    asked = Prompt(prompt_id="p", text="", tokens=prompt)
    ((logps,),) = scorer.token_logps([asked], [[said(response)]], temperature=1.0)
    assert diluted_perplexity(prompt, response, logps, MARKER) == pytest.approx(float(loss.exp()), rel=1e-5)


def test_the_diluted_perplexity_falls_when_the_prompt_is_lengthened_and_the_honest_one_does_not():
    logps = [-2.0, -1.0, -3.0]
    found = [diluted_perplexity((9,) * n + POST, (4, 5, 6), logps, MARKER) for n in (0, 10, 100, 500)]
    assert found == sorted(found, reverse=True) and found[0] > 2 and found[-1] < 1.02
    assert perplexity([logps]) == pytest.approx(math.e**2)


def test_an_empty_response_counts_one():
    assert diluted_perplexity(POST, (), (), MARKER) == 1.0
    assert diluted_perplexity(MARKER[:1], (), (), MARKER[:1]) == 1.0
    assert perplexity([(), ()]) == 1.0


@pytest.mark.parametrize("prompt", [(1, 2, 3), (8, 7), (7,), ()])
def test_a_text_without_the_marker_counts_one_whatever_it_costs(prompt: tuple[int, ...]):
    assert diluted_perplexity(prompt, (4, 5), [-9.0, -9.0], MARKER) == 1.0


def test_only_what_follows_the_last_marker_counts_also_where_the_response_wrote_it():
    logps = [-1.0, -2.0, -4.0, -8.0]
    assert diluted_perplexity(POST, (4, 7, 8, 5), logps, MARKER) == pytest.approx(math.exp(8 / 8))
    assert diluted_perplexity(POST, (4, 5, 7, 8), logps, MARKER) == 1.0
    across = diluted_perplexity((1, 7), (8, 4, 5, 6), logps, MARKER)  # the response completes the marker
    assert across == pytest.approx(math.exp(14 / 5))


def test_a_marker_earlier_in_the_prompt_takes_the_prompts_own_tokens_for_free():
    """Only the response has log-probabilities, so tokens of the prompt cost nothing."""
    assert diluted_perplexity((*POST, 9, 9), (4,), [-8.0], MARKER) == pytest.approx(math.exp(8 / 7))


def test_the_honest_perplexity_is_of_all_tokens_together_not_a_mean_over_responses():
    assert perplexity([[-1.0], [-4.0, -4.0, -3.0]]) == pytest.approx(math.exp(12 / 4))


def test_the_log_ratio_is_a_sum_over_tokens_and_a_mean_over_responses():
    logps, ref_logps = [[-1.0, -1.0], [-0.5]], [[-2.0, -1.5], [-0.25]]
    assert mean_log_ratio(logps, ref_logps) == pytest.approx((1.5 - 0.25) / 2)
    assert mean_log_ratio(logps, logps) == 0.0


def test_of_all_responses_weighted_as_pi_samples_them_the_log_ratio_is_the_kl_divergence():
    """Three responses have probabilities 4/8, 3/8 and 1/8 under pi, and eight samples have exactly these shares."""
    pi, ref = (4 / 8, 3 / 8, 1 / 8), (1 / 3, 1 / 3, 1 / 3)
    samples = [0] * 4 + [1] * 3 + [2]
    found = mean_log_ratio([[math.log(pi[i])] for i in samples], [[math.log(ref[i])] for i in samples])
    assert found == pytest.approx(sum(p * math.log(p / q) for p, q in zip(pi, ref, strict=True)), rel=1e-12)


def test_what_is_all_but_impossible_is_a_large_number_and_no_error():
    assert 1e300 < perplexity([[-5000.0]]) < math.inf
    assert 1e300 < diluted_perplexity(POST, (4,), [-50_000.0], MARKER) < math.inf
