"""The share of weights that differ between two folders."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tba.train import sync_writer
from tba.train.sync_writer import changed_share


def folder(path: Path, **files: dict[str, torch.Tensor]) -> Path:
    path.mkdir()
    for name, tensors in files.items():
        save_file(tensors, path / f"{name}.safetensors")
    return path


def test_weights_count_alike_whichever_tensor_and_file_they_are_in(tmp_path, monkeypatch):
    monkeypatch.setattr(sync_writer, "ELEMENTS_AT_ONCE", 4)
    before = {"a": torch.zeros(3, 3), "b": torch.zeros(5), "c": torch.tensor(1.0)}
    after = {"a": torch.zeros(3, 3), "b": torch.zeros(5), "c": torch.tensor(2.0)}
    after["a"][2, 2] = after["b"][0] = 1.0
    old, new = (
        folder(tmp_path / name, one={"a": it["a"]}, two={"b": it["b"], "c": it["c"]})
        for name, it in (("old", before), ("new", after))
    )
    assert changed_share(old, new) == 3 / 15
    assert changed_share(new, new) == 0.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_what_counts_is_whether_their_bits_are_the_same(tmp_path, dtype):
    old = folder(tmp_path / "old", all={"a": torch.tensor([0.0, 1.0, math.nan]).to(dtype)})
    new = folder(tmp_path / "new", all={"a": torch.tensor([-0.0, 1.0, math.nan]).to(dtype)})
    assert changed_share(old, new) == 1 / 3
