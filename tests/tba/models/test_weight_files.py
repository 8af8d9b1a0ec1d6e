"""Files of weights: they are those of safetensors and transformers, and their digests are those of the files."""

import json
import math
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from benchmarks.harness.tiny_models import tiny_tokenizer
from tba.models.policy import Policy, Snapshot
from tba.models.saving import weight_files
from tba.models.saving.weight_files import Stored, write_model, write_tensors
from tests.support.models.families import FAMILIES, family_folder


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def stored(tensors: dict[str, torch.Tensor]) -> dict[str, Stored]:
    return {name: Stored(it, it.dtype) for name, it in tensors.items()}


def folder(path: Path, *files: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    for number, tensors in enumerate(files):
        save_file(tensors, path / f"{number}.safetensors")
    return path


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_of_any_family_is_the_one_that_transformers_writes(tmp_path, monkeypatch, family):
    monkeypatch.setattr(weight_files, "PIECE_BYTES", 1000)
    model = AutoModelForCausalLM.from_pretrained(family_folder(tmp_path / "start", FAMILIES[family]))
    written = Snapshot(model, tiny_tokenizer()).save(tmp_path / "ours", dtype="bfloat16")
    model.bfloat16().save_pretrained(tmp_path / "theirs")
    tiny_tokenizer().save_pretrained(tmp_path / "theirs")
    ours, theirs = contents(tmp_path / "ours"), contents(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if ours[name] != theirs[name]] == []
    assert written.sha256s == {"model.safetensors": sha256(ours["model.safetensors"]).hexdigest()}


@pytest.mark.parametrize("family", ["qwen2, tied", "mixtral"])
def test_a_model_in_several_files_loads_as_the_same_policy(tmp_path, monkeypatch, family):
    monkeypatch.setattr(weight_files, "FILE_BYTES", 20_000)
    policy = Policy.load(family_folder(tmp_path / "start", FAMILIES[family]), device="cpu")
    written = policy.snapshot().save(tmp_path / "parts")
    parts = {it.name: it for it in (tmp_path / "parts").glob("*.safetensors")}
    assert len(parts) > 2 and written.sha256s == {it: sha256(parts[it].read_bytes()).hexdigest() for it in parts}
    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {key: name for name, path in parts.items() for key in load_file(path)}
    assert Policy.load(tmp_path / "parts", device="cpu").snapshot().sha256 == policy.snapshot().sha256


def test_tensors_of_every_shape_are_written_as_safetensors_writes_them(tmp_path):
    tensors = {"é": torch.zeros(0, 3), "b": torch.randn(4, 5).t().contiguous(), "a": torch.tensor(2.0)}
    tensors |= {"half": torch.randn(3).bfloat16(), "flags": torch.tensor([True, False]), "n": torch.arange(4)}
    digest, _ = write_tensors(tmp_path / "ours", stored(tensors), {"format": "pt"})
    read = load_file(tmp_path / "ours")
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], tensors[name]) and read[name].dtype == it.dtype for name, it in tensors.items())
    assert digest == sha256((tmp_path / "ours").read_bytes()).hexdigest()


def test_weights_that_are_not_contiguous_are_written_in_their_order(tmp_path):
    weights = torch.arange(12.0).reshape(3, 4)
    write_tensors(tmp_path / "file", {"w": Stored(weights.t(), torch.float32)}, {})
    assert torch.equal(load_file(tmp_path / "file")["w"], weights.t())


# --- The share of weights that differ from an earlier version ---


def test_weights_count_alike_whichever_tensor_and_file_they_are_in(tmp_path, monkeypatch):
    monkeypatch.setattr(weight_files, "PIECE_BYTES", 16)
    before = {"a": torch.zeros(3, 3), "b": torch.zeros(5), "c": torch.tensor(1.0)}
    after = {"a": torch.zeros(3, 3), "b": torch.zeros(5), "c": torch.tensor(2.0)}
    after["a"][2, 2] = after["b"][0] = 1.0
    old = folder(tmp_path / "old", {"a": before["a"]}, {"b": before["b"], "c": before["c"]})
    new = folder(tmp_path / "new")
    assert write_model(new, stored(after), before=old).changed_share == 3 / 15
    assert write_model(tmp_path, stored(after), before=new).changed_share == 0.0
    assert write_model(tmp_path, stored(after)).changed_share is None


def test_a_weight_that_the_earlier_version_does_not_have_counts_as_changed(tmp_path):
    old = folder(tmp_path / "old", {"a": torch.zeros(3), "b": torch.zeros(2)})
    new = {"a": torch.zeros(3), "b": torch.zeros(4), "c": torch.zeros(1)}
    assert write_model(tmp_path, stored(new), before=old).changed_share == 5 / 8


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_what_counts_is_whether_their_bits_are_the_same(tmp_path, dtype):
    old = folder(tmp_path / "old", {"a": torch.tensor([0.0, 1.0, math.nan]).to(dtype)})
    new = {"a": Stored(torch.tensor([-0.0, 1.0, math.nan]), dtype)}
    assert write_model(tmp_path, new, before=old).changed_share == 1 / 3
