"""Models that are trained beside the policy, for its sake alone: the values of PPO, and a learned log Z.

They live with the trainer and in its checkpoints, and are never published. Each begins with a head of zeros, the value
model on a copy of the policy as it is then.
"""
# Shapes: B = P x K rows, P prompts (groups), K responses per prompt, T tokens of a row with padding, D hidden.

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.batches.batching import Batch, prompt_lengths, stretches
from tba.config import Config
from tba.errors import ConfigError
from tba.models.adapters import copy_of
from tba.train.micro_batches import Piece
from tba.train.trained_model import Trained


class Head(nn.Module):
    """One number of each hidden state, in float32 at least; zeros at first."""

    def __init__(self, policy: PreTrainedModel):
        super().__init__()
        width = cast(Any, policy.get_output_embeddings()).weight.shape[-1]
        options: dict[str, Any] = {"dtype": torch.promote_types(policy.dtype, torch.float32), "device": policy.device}
        self.weight_D = nn.Parameter(torch.zeros(width, **options))
        self.bias = nn.Parameter(torch.zeros((), **options))

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):
            return hidden.to(self.weight_D.dtype) @ self.weight_D + self.bias


class ValueModel(nn.Module):
    """The reward that is expected before each token of a response: a scalar head on a backbone of its own."""

    def __init__(self, policy: PreTrainedModel):
        super().__init__()
        self.backbone, self.head = copy_of(_backbone(policy)), Head(policy)

    def forward(self, piece: Piece) -> Tensor:
        """[R] of each token that counts: that of all before it."""
        return self.head(piece.hidden(self.backbone))


class LogZ(nn.Module):
    """Linear in the mean, over a prompt's tokens, of the policy's last hidden state, through which no gradient goes."""

    def __init__(self, policy: PreTrainedModel):
        super().__init__()
        _backbone(policy)
        self.head = Head(policy)

    def forward(self, policy: PreTrainedModel, batch: Batch, most_tokens: int | None = None) -> Tensor:
        """[P] of prompts that are read in calls of at most so many tokens with padding, or of one prompt."""
        length_P = prompt_lengths(batch)
        tokens_PT = batch.tokens_BT[:: batch.responses_per_prompt]
        lengths = length_P.tolist()
        calls = stretches(len(lengths), lambda them: len(lengths[them]) * max(lengths[them]), most_tokens)
        return self.head(
            torch.cat([self._means(policy, tokens_PT[it, : max(lengths[it])], length_P[it]) for it in calls])
        )

    @torch.no_grad()
    def _means(self, policy: PreTrainedModel, tokens_PT: Tensor, length_P: Tensor) -> Tensor:
        mask_PT = torch.arange(tokens_PT.shape[1], device=length_P.device) < length_P[:, None]
        read = _backbone(policy)(input_ids=tokens_PT, use_cache=False)  # padding stands on the right
        hidden_PTD = read.last_hidden_state.to(self.head.weight_D.dtype)
        return (hidden_PTD * mask_PT[:, :, None]).sum(dim=1) / length_P[:, None]


def make_companion(config: Config, policy: PreTrainedModel) -> Trained[ValueModel | LogZ] | None:
    """What the objective has trained beside this policy, if anything."""
    auxiliary, training = config.objective.auxiliary, config.training
    if auxiliary is None:
        return None
    model = {"value": ValueModel, "log_z": LogZ}[auxiliary.kind](policy)
    rate = auxiliary.learning_rate or training.learning_rate
    return Trained(model, training, learning_rate=rate, name=auxiliary.kind)


def _backbone(policy: PreTrainedModel) -> Any:
    backbone = policy.base_model
    if backbone is policy:
        raise ConfigError(
            f"objective: what it trains beside the policy needs its backbone, and a {type(policy).__name__} has none"
        )
    return backbone
