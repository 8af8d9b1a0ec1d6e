"""Models that are trained beside the policy, for its sake alone: the values of PPO, and a learned log Z.

They live with the trainer and in its checkpoints, and are never published. Each begins with a head of zeros, the value
model on a copy of the policy as it is then.
"""
# Shapes: B = P x K rows, P prompts (groups), K responses per prompt, T tokens of a row with padding, D hidden.

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.batching import Batch, prompt_lengths
from tba.config import Config
from tba.errors import ConfigError
from tba.trained import Trained


class Head(nn.Module):
    """One number of each hidden state, in float32 at least; zeros at first."""

    def __init__(self, policy: PreTrainedModel):
        super().__init__()
        width = cast(Any, policy.get_output_embeddings()).weight.shape[-1]
        options: dict[str, Any] = {"dtype": torch.promote_types(policy.dtype, torch.float32), "device": policy.device}
        self.weight_D = nn.Parameter(torch.zeros(width, **options))
        self.bias = nn.Parameter(torch.zeros((), **options))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden.to(self.weight_D.dtype) @ self.weight_D + self.bias


class ValueModel(nn.Module):
    """The reward that is expected before each token of a response: a scalar head on a backbone of its own."""

    def __init__(self, policy: PreTrainedModel):
        super().__init__()
        self.backbone, self.head = copy.deepcopy(_backbone(policy)), Head(policy)

    def fields(self, policy: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        mask_BT = batch.response_mask_BT
        value_BT = self.head(_hidden(self.backbone, batch.tokens_BT[:, :-1]))
        value_BT = nn.functional.pad(value_BT, (1, 0)) * mask_BT  # a token's is that of all before it
        return {"value_PKT": value_BT.unflatten(0, (-1, batch.responses_per_prompt))}


class LogZ(nn.Module):
    """Linear in the mean, over a prompt's tokens, of the policy's last hidden state, through which no gradient goes."""

    def __init__(self, policy: PreTrainedModel):
        super().__init__()
        _backbone(policy)
        self.head = Head(policy)

    def fields(self, policy: PreTrainedModel, batch: Batch) -> dict[str, Tensor]:
        length_P = prompt_lengths(batch)
        tokens_PT = batch.tokens_BT[:: batch.responses_per_prompt, : int(length_P.max())]
        mask_PT = torch.arange(tokens_PT.shape[1], device=length_P.device) < length_P[:, None]
        with torch.no_grad():
            hidden_PTD = _hidden(_backbone(policy), tokens_PT).to(self.head.weight_D.dtype)
        mean_PD = (hidden_PTD * mask_PT[:, :, None]).sum(dim=1) / length_P[:, None]
        return {"log_z_P": self.head(mean_PD)}


def make_companion(config: Config, policy: PreTrainedModel) -> Trained[ValueModel | LogZ] | None:
    """What the objective has trained beside this policy, if anything."""
    objective, training = config.objective, config.training
    if objective.name == "ppo":
        rate = objective.value_learning_rate or training.learning_rate
        return Trained(ValueModel(policy), training, learning_rate=rate, name="value")
    if objective.log_z == "learned":
        return Trained(LogZ(policy), training, learning_rate=objective.log_z_learning_rate, name="log_z")
    return None


def _backbone(policy: PreTrainedModel) -> Any:
    backbone = policy.base_model
    if backbone is policy:
        raise ConfigError(
            f"objective: what it trains beside the policy needs its backbone, and a {type(policy).__name__} has none"
        )
    return backbone


def _hidden(backbone: Any, tokens_BT: Tensor) -> Tensor:
    """[B, T, D] the last hidden state; padding stands on the right, where causality makes it harmless."""
    return backbone(input_ids=tokens_BT, use_cache=False).last_hidden_state
