"""Which number format a model multiplies matrices in."""

from pathlib import Path

import pytest
import torch

from benchmarks.harness.tiny_models import tiny_llama
from tba.config import Config, parse
from tba.models.pretrained import is_lowered
from tba.runtime import compute_dtype
from tba.runtime.compute_dtype import LEAST_PARAMETERS, choose, cpu_multiplies_bfloat16

LARGE, CPU = LEAST_PARAMETERS, torch.device("cpu")


@pytest.fixture(params=["AVX512_BF16", ""])
def instructions(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(compute_dtype, "cpu_multiplies_bfloat16", lambda: request.param)
    return request.param


@pytest.mark.parametrize("setting", ["auto", "bfloat16-on-gpu", "float32", "bfloat16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("parameters", [LARGE - 1, LARGE])
def test_a_cpu_computes_in_bfloat16_only_where_that_is_faster(setting, device, parameters, instructions):
    expected = setting
    if setting in ("auto", "bfloat16-on-gpu"):
        faster = device == "cuda" or (setting == "auto" and bool(instructions) and parameters >= LARGE)
        expected = "bfloat16" if faster else "float32"
    name, why = choose(setting, device=device, parameters=parameters)
    assert (name, bool(why)) == (expected, True)
    if setting == "auto" and device == "cpu" and name == "bfloat16":
        assert instructions in why


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu avx512f avx512_bf16 amx_bf16", "AMX_BF16"),
        ("fpu avx512_bf16", "AVX512_BF16"),
        ("fpu avx512f avx512_bf16x", ""),
    ],
)
def test_the_instructions_of_a_cpu_are_read_from_linux(flags: str, expected: str, tmp_path: Path):
    file = tmp_path / "cpuinfo"
    file.write_text(f"processor\t: 0\nmodel name\t: avx512_bf16\nflags\t\t: {flags}\nbugs\t\t: none\n")
    assert cpu_multiplies_bfloat16(file) == expected


def test_where_the_system_does_not_tell_a_cpu_computes_in_float32(tmp_path: Path):
    assert cpu_multiplies_bfloat16(tmp_path / "missing") == ""


def test_the_size_and_the_weights_of_a_model_decide(instructions):
    small, large = tiny_llama(), tiny_llama(width=512, layers=2)
    assert sum(it.numel() for it in large.parameters()) >= LARGE
    assert not is_lowered(small, "auto", CPU)
    assert is_lowered(large, "auto", CPU) == bool(instructions)
    assert not is_lowered(large.to(torch.bfloat16), "auto", CPU)


def test_auto_of_an_older_run_stays_what_it_was():
    stored = Config().replace({"training.compute_dtype": "auto"}).to_dict()
    assert parse(stored).training.compute_dtype == "auto"
    del stored["training"]["computed_rows"]
    assert parse({"training": {"compute_dtype": "auto"}}).training.compute_dtype == "auto", "no stored run is so short"
    older = parse(stored).training
    assert (older.compute_dtype, older.computed_rows) == ("bfloat16-on-gpu", "all")
