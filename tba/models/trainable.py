"""Check a loaded policy, before a run starts with it, for faults that its files do not show."""

from typing import Any, cast

import torch
from transformers import PreTrainedModel

from tba.errors import ConfigError
from tba.models.folder import check_length, why_no_policy
from tba.models.policy import Policy
from tba.models.pretrained import end_tokens


def check_first_policy(policy: Policy, *, longest: int) -> None:
    """Raise ConfigError if a run cannot train this policy. In this run, a prompt and its response have at most
    `longest` tokens together."""
    model, tokenizer = policy.model, policy.tokenizer
    check_length(model.config.to_dict(), longest)
    rows = cast(Any, model.get_input_embeddings()).weight.shape[0]
    names = {number: name for name, number in tokenizer.get_vocab().items() if number != tokenizer.pad_token_id}
    fault = why_no_policy(model.config.to_dict())
    if (most := max(names)) >= rows:
        fault = f"its tokenizer has a token {names[most]!r} of number {most}, but its embedding has only {rows} rows"
    elif not end_tokens(model.generation_config, tokenizer):
        fault = "neither its tokenizer nor generation_config.json has an end token (eos_token): no response would end"
    elif (following := _change_with_later_tokens(model, policy.pad_id)) is None:
        fault = "its predictions are not finite: a weight is infinite or NaN, perhaps only in this dtype"
    elif following > 0.005:
        fault = f"a {type(model).__name__} is no causal language model: its predictions depend on later tokens"
    if fault:
        raise ConfigError(f"model.path: {model.name_or_path!r} cannot be trained: {fault}")


@torch.no_grad()
def _change_with_later_tokens(model: PreTrainedModel, filler: int) -> float | None:
    """Measure whether a model's prediction depends on later tokens.

    The model reads two rows that begin with the same token and continue with different tokens, one of them with the
    padding token. Return the change of the logits after the first token, divided by their change after the second,
    where the rows already differ. For a causal model this is 0 up to rounding. Return None if a logit is not finite.
    """
    token, other = sorted({0, 1, 2} - {filler})[:2]
    rows = (torch.tensor([[token] + [later] * 7], device=model.device) for later in (filler, other))
    logits, others = (model(input_ids=row, use_cache=False).logits[0].float() for row in rows)
    if not (logits.isfinite().all() and others.isfinite().all()):
        return None
    first, second, *_ = (logits - others).abs().amax(dim=1).tolist()
    return first / second if second else float(first > 0)
