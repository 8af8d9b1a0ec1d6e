"""Weights that the generator based on transformers adopts, also from folders that are damaged or being removed."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness.tiny_models import tiny_folder, tiny_tokenizer
from tba.errors import Damaged, Missing
from tba.generation.requests import generate
from tba.models.policy import Policy
from tests.support.builders import tokens_of
from tests.support.models.generator_examples import CONFIGS, PROMPTS, V0, V1, make_folder, make_generator, make_prompts


@pytest.mark.parametrize("tied", [True, False])
def test_adopted_weights_are_the_ones_that_generate(tmp_path, tied):
    first, second = (tiny_folder(tmp_path / str(seed), seed=seed, tied=tied) for seed in (0, 1))
    prompts, seeds = make_prompts(PROMPTS), [[1, 2, 3]] * 4
    generator = make_generator(first)
    before = generate(generator, prompts, seeds, temperature=1.0)
    generator.adopt(second, V1)
    after = generate(generator, prompts, seeds, temperature=1.0)
    assert tokens_of(before) == tokens_of(generate(make_generator(first), prompts, seeds, temperature=1.0))
    assert tokens_of(after) == tokens_of(generate(make_generator(second), prompts, seeds, temperature=1.0))
    assert {(r.version_start, r.version_end) for group in before for r in group} == {(V0, V0)}
    assert {(r.version_start, r.version_end) for group in after for r in group} == {(V1, V1)}


def test_weights_are_copied_into_the_model_that_is_there(tmp_path):
    folders = [tiny_folder(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    generator = make_generator(folders[0])
    seen: set[int] = set()
    handle = torch.nn.modules.module.register_module_forward_pre_hook(lambda module, _: seen.add(id(module)))
    try:
        generate(generator, make_prompts(["1"]), [[1]], temperature=1.0)
        modules = set(seen)
        generator.adopt(folders[1], V1)
        generate(generator, make_prompts(["1"]), [[1]], temperature=1.0)
    finally:
        handle.remove()
    assert seen == modules


def test_what_was_read_ahead_is_adopted_also_where_the_folder_has_gone(tmp_path):
    first, second, third = (tiny_folder(tmp_path / str(seed), seed=seed) for seed in range(3))
    prompts, seeds = make_prompts(PROMPTS), [[1, 2, 3]] * 4
    expected = generate(make_generator(second), prompts, seeds, temperature=1.0)
    generator = make_generator(first)
    generator.read_ahead(third)
    generator.read_ahead(second)
    shutil.rmtree(second)
    generator.adopt(second, V1)
    assert tokens_of(generate(generator, prompts, seeds, temperature=1.0)) == tokens_of(expected)
    with pytest.raises(Missing, match="removed"):
        generator.adopt(second, V1)  # once


@pytest.mark.parametrize("told", ["first", "bad", "gone"])
def test_reading_ahead_in_vain_changes_nothing(tmp_path, told: str):
    first, second = (tiny_folder(tmp_path / name, seed=seed) for seed, name in enumerate(("first", "second")))
    (tiny_folder(tmp_path / "bad") / "model.safetensors").write_bytes(b"nothing")
    prompts, seeds = make_prompts(PROMPTS), [[1, 2, 3]] * 4
    expected = generate(make_generator(second), prompts, seeds, temperature=1.0)
    generator = make_generator(first)
    generator.read_ahead(tmp_path / told)
    assert generator.version == V0
    generator.adopt(second, V1)
    assert tokens_of(generate(generator, prompts, seeds, temperature=1.0)) == tokens_of(expected)


def test_weights_in_several_files_are_adopted_too(tmp_path):
    config = CONFIGS["llama"]
    whole = make_folder(tmp_path / "whole", config, seed=1)
    model = AutoModelForCausalLM.from_pretrained(whole)
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(tmp_path / "parts")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 1
    generator = make_generator(make_folder(tmp_path / "other", config))
    generator.adopt(tmp_path / "parts", V1)
    prompts, seeds = make_prompts(PROMPTS), [[1, 2]] * 4
    expected = generate(make_generator(whole), prompts, seeds, temperature=1.0)
    assert tokens_of(generate(generator, prompts, seeds, temperature=1.0)) == tokens_of(expected)


def test_another_architecture_is_built_anew(tmp_path):
    generator = make_generator(tiny_folder(tmp_path / "llama"))
    other = make_folder(tmp_path / "gpt2", CONFIGS["gpt2"])
    generator.adopt(other, V1)
    prompts, seeds = make_prompts(PROMPTS), [[1, 2]] * 4
    expected = generate(make_generator(other), prompts, seeds, temperature=1.0)
    assert tokens_of(generate(generator, prompts, seeds, temperature=1.0)) == tokens_of(expected)


def test_a_folder_that_cannot_be_loaded_leaves_the_weights_that_were_there(tmp_path):
    generator = make_generator(tiny_folder(tmp_path / "good"))
    bad = tiny_folder(tmp_path / "bad", seed=1)
    weights = bad / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    prompts, seeds = make_prompts(PROMPTS), [[1, 2]] * 4
    before = generate(generator, prompts, seeds, temperature=1.0)
    with pytest.raises(Damaged, match="bad"):
        generator.adopt(bad, V1)
    with pytest.raises(Damaged, match="bad"):
        make_generator(bad)
    after = generate(generator, prompts, seeds, temperature=1.0)
    assert tokens_of(after) == tokens_of(before) and after[0][0].version_start == V0


@pytest.mark.parametrize("left", [["model.safetensors", "tokenizer.json"], ["tokenizer.json"], [], None])
def test_a_folder_that_is_being_removed_is_missing_and_leaves_the_weights_that_were_there(tmp_path, left):
    """Files are removed in the order of their names, so the config goes before the weights. Then the folder goes."""
    generator = make_generator(tiny_folder(tmp_path / "good"))
    going = tiny_folder(tmp_path / "going", seed=1)
    for file in going.iterdir():
        if file.name not in (left or []):
            file.unlink()
    if left is None:
        going.rmdir()
    with pytest.raises(Missing, match="removed"):
        generator.adopt(going, V1)
    with pytest.raises(Missing, match="removed"):
        make_generator(going)
    assert generator.version == V0


def test_a_folder_that_is_removed_while_a_model_is_made_of_it_is_missing(tmp_path, monkeypatch):
    load = Policy.load

    def load_and_remove(folder: Path, **options: Any) -> Policy:
        (folder / "config.json").unlink()
        return load(tiny_folder(tmp_path / "whole"), **options)

    monkeypatch.setattr(Policy, "load", load_and_remove)
    with pytest.raises(Missing, match="removed"):
        make_generator(tiny_folder(tmp_path / "going"))
