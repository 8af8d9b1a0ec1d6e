"""Models that are trained together with the policy only to help train it: a value model, and a learned log Z.

These models live in the trainer and in its checkpoints, and are never published. The weights of their heads begin at 0.
The backbone of the value model begins as a copy of the policy from which training starts.
"""
# Shapes: B = P x K rows, P prompts (groups), K responses per prompt, T tokens of a row with padding, D hidden.

from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tba.batches.batching import Batch, prompt_lengths, stretches
from tba.config import Config
from tba.distributed.ranks import ALONE, Ranks, gather
from tba.errors import ConfigError
from tba.models.policy import Policy
from tba.train.micro_batches import Piece
from tba.train.trained_model import Trained


class Head(nn.Module):
    """A linear layer that computes one number from each hidden state, in float32 or higher precision. Its weights begin
    at 0."""

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
    """Predicts the reward that is expected before each token of a response: a head on a backbone of its own."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.backbone, self.head = policy.backbone_twin(), Head(policy.model)
        policy.spread(self.head)

    def forward(self, piece: Piece) -> Tensor:
        """Return the [R] values of the counted tokens. Each value is computed from the tokens before its token."""
        return self.head(piece.hidden(self.backbone))


class LogZ(nn.Module):
    """Predicts log Z of a prompt: a linear function of the policy's last hidden state, averaged over the tokens of the
    prompt. No gradient goes into the policy."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.head = Head(policy.model)
        policy.spread(self.head)

    def forward(
        self, policy: PreTrainedModel, batch: Batch, most_tokens: int | None = None, ranks: Ranks = ALONE
    ) -> Tensor:
        """Return [P]: log Z of each prompt. The policy reads at most `most_tokens` tokens per call, padding included,
        or a single prompt. All ranks must call this together. A rank with fewer calls repeats its first one, because
        ranks compute each layer together."""
        length_P = prompt_lengths(batch)
        tokens_PT = batch.tokens_BT[:: batch.responses_per_prompt]
        lengths = length_P.tolist()
        calls = list(stretches(len(lengths), lambda chosen: len(lengths[chosen]) * max(lengths[chosen]), most_tokens))
        repeated = calls[:1] * (ranks.most([len(calls)])[0] - len(calls))
        means = [
            self._means(policy, tokens_PT[call, : max(lengths[call])], length_P[call]) for call in (*calls, *repeated)
        ]
        return self.head(torch.cat(means[: len(calls)]))

    @torch.no_grad()
    def _means(self, policy: PreTrainedModel, tokens_PT: Tensor, length_P: Tensor) -> Tensor:
        mask_PT = torch.arange(tokens_PT.shape[1], device=length_P.device) < length_P[:, None]
        gather(policy)
        read = policy.base_model(input_ids=tokens_PT, use_cache=False)  # padding is on the right
        hidden_PTD = read.last_hidden_state.to(self.head.weight_D.dtype)
        return (hidden_PTD * mask_PT[:, :, None]).sum(dim=1) / length_P[:, None]


def make_auxiliary_model(config: Config, policy: Policy) -> Trained[ValueModel | LogZ] | None:
    """Return the model that the objective needs in addition to this policy, with its optimizer, or None if the
    objective needs no such model."""
    auxiliary, training = config.objective.auxiliary, config.training
    if auxiliary is None:
        return None
    _check_backbone(config, auxiliary.kind, policy.model)
    model = {"value": ValueModel, "log_z": LogZ}[auxiliary.kind](policy)
    rate = auxiliary.learning_rate or training.learning_rate
    return Trained(model, training, learning_rate=rate, name=auxiliary.kind)


def _check_backbone(config: Config, kind: str, policy: PreTrainedModel) -> None:
    """Raise ConfigError, naming the setting that asks for the auxiliary model, if the policy has no backbone."""
    if policy.base_model is not policy:
        return
    setting, value, trained = {
        "value": ("objective.name", config.objective.name, "a value model"),
        "log_z": ("objective.log_z", "learned", "a learned log Z"),
    }[kind]
    raise ConfigError(
        f"{setting}: {trained} reads the policy's backbone, but a {type(policy).__name__} has none, got {value!r}"
    )
