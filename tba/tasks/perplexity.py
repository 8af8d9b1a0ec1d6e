"""How far responses lie from the reference: the honest measures, and a published one that is none of them.

Log-probabilities are natural, one for each token of a response, its end token included.
"""

import math
from collections.abc import Sequence


def mean_log_ratio(logps: Sequence[Sequence[float]], ref_logps: Sequence[Sequence[float]]) -> float:
    """Return the mean of log pi - log pi_ref over whole responses. For responses sampled from pi it is an unbiased
    estimate of KL(pi || pi_ref)."""
    return sum(math.fsum(own) - math.fsum(ref) for own, ref in zip(logps, ref_logps, strict=True)) / len(logps)


def perplexity(logps: Sequence[Sequence[float]]) -> float:
    """Return exp of the mean negative log-probability over all tokens of all responses; 1 if there are no tokens."""
    tokens = sum(len(row) for row in logps)
    return _exp(-math.fsum(logp for row in logps for logp in row) / max(1, tokens))


def diluted_perplexity(
    prompt: Sequence[int], response: Sequence[int], logps: Sequence[float], marker: Sequence[int]
) -> float:
    """Of one text, as it is published for summaries (Async RLHF, and TBA after it): the negative log-probability of the
    response's tokens, but divided by the number of all tokens, those of the prompt included, less one.

    The response is what follows the last `marker`, also where it wrote that itself; without any the text counts 1.
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
    return math.exp(min(exponent, 700.0))  # beyond, there are no numbers
