"""Measures of how far responses are from the reference. One of them, `diluted_perplexity`, is misleading, and is here
because papers publish it.

Log-probabilities are natural logarithms. There is one log-probability for each token of a response, including its end
token.
"""

import math
from collections.abc import Sequence


def mean_log_ratio(logps: Sequence[Sequence[float]], ref_logps: Sequence[Sequence[float]]) -> float:
    """Return the mean over responses of log pi - log pi_ref, each of a whole response. If the responses are sampled
    from pi, this is an unbiased estimate of KL(pi || pi_ref)."""
    return sum(math.fsum(own) - math.fsum(ref) for own, ref in zip(logps, ref_logps, strict=True)) / len(logps)


def perplexity(logps: Sequence[Sequence[float]]) -> float:
    """Return exp of the mean negative log-probability over all tokens of all responses; 1 if there are no tokens."""
    tokens = sum(len(row) for row in logps)
    return _exp(-math.fsum(logp for row in logps for logp in row) / max(1, tokens))


def diluted_perplexity(
    prompt: Sequence[int], response: Sequence[int], logps: Sequence[float], marker: Sequence[int]
) -> float:
    """Return the perplexity of one summary as Async RLHF, and TBA after it, published it. The negative log-probability
    of the summary is divided by the number of all tokens, those of the prompt included, less 1. `perplexity` divides by
    the number of tokens of the responses instead.

    The summary is the text after the last `marker`, even if the policy wrote this marker itself. A text without a
    marker has perplexity 1.
    """
    text = (*prompt, *response)
    begin = _end_of_last(marker, text)
    if begin is None:
        return 1.0
    counted = logps[max(0, begin - len(prompt)) :]
    return _exp(-math.fsum(counted) / max(1, len(text) - 1))


def _end_of_last(marker: Sequence[int], text: Sequence[int]) -> int | None:
    sought = tuple(marker)
    return next((i for i in range(len(text), len(sought) - 1, -1) if text[i - len(sought) : i] == sought), None)


def _exp(exponent: float) -> float:
    return math.exp(min(exponent, 700.0))  # a larger exponent would overflow
