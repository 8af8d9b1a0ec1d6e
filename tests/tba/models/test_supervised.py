from itertools import repeat

import pytest
import torch

from benchmarks.harness.tiny_models import EOS_ID, tiny_llama
from tba.models.supervised import Demonstration, cross_entropy, fine_tune, probabilities

SHOWN = [Demonstration((5, 6), (7, 8, EOS_ID)), Demonstration((9,), (10, EOS_ID))]


def test_the_loss_is_the_mean_over_response_tokens_alone():
    model = tiny_llama()
    expected, tokens = 0.0, 0
    for prompt, response in SHOWN:
        whole = torch.tensor([[*prompt, *response]])
        logps = torch.log_softmax(model(input_ids=whole).logits[0, :-1].double(), dim=-1)
        for place in range(len(prompt), whole.shape[1]):
            expected -= float(logps[place - 1, whole[0, place]].detach())
            tokens += 1
    assert float(cross_entropy(model, SHOWN).detach()) == pytest.approx(expected / tokens, rel=1e-5)


def test_fine_tuning_teaches_what_it_shows():
    model = tiny_llama()
    before = probabilities(model, SHOWN)
    losses = list(fine_tune(model, repeat(SHOWN), steps=60, learning_rate=1e-2))
    after = probabilities(model, SHOWN)
    assert len(losses) == 60 and losses[-1] < losses[0] / 10
    assert (after > 0.9).all() and (before < 0.5).all()


def test_the_same_model_and_batches_give_the_same_weights():
    def weights() -> torch.Tensor:
        model = tiny_llama()
        list(fine_tune(model, repeat(SHOWN), steps=5, learning_rate=1e-3, warmup_steps=2))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(), weights())


def test_probabilities_are_those_of_whole_responses():
    model = tiny_llama()
    chances = probabilities(model, [Demonstration((5,), (token,)) for token in range(model.config.vocab_size)])
    assert float(chances.sum()) == pytest.approx(1.0, rel=1e-4)
