"""Roles on a machine that seems to have NVIDIA GPUs: which devices they get, and what is refused."""

from pathlib import Path

import pytest
import torch

from flows import cli, driver_check
from flows.supervision.background_supervisor import local_launcher
from flows.supervision.gpus import Devices, memory_warnings
from storage.runs.run import Run
from tba.errors import ConfigError
from tba.presets import preset
from tests.support.flows.device_holder import Hold
from tests.support.nvidia import set_gpus, set_tool


def test_nine_roles_share_eight_gpus_and_the_trainer_keeps_its_own(
    tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch
):
    gpus = set_gpus(monkeypatch, tmp_path, 8)
    kinds = ["trainer", *["searcher"] * 7, "evaluator"]
    held = [hold(Devices("runs/ours", folder=tmp_path), kind).uuids for kind in kinds]
    assert held == [*gpus, gpus[1]]


def test_instances_of_a_gpu_are_devices_of_their_own(tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch):
    instances = set_gpus(monkeypatch, tmp_path, 2, instances=2)
    kinds = ["trainer", "searcher", "searcher", "searcher", "evaluator"]
    held = [hold(Devices("runs/ours", folder=tmp_path), kind).uuids for kind in kinds]
    assert held == [*instances, instances[1]]


def test_in_wsl2_engines_have_gpus_of_their_own(tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch):
    """Two engines that take 0.6 of the same GPU could not both start."""
    set_gpus(monkeypatch, tmp_path, 2, files=["dxg"], tools="wsl")
    held = [hold(Devices(run, folder=tmp_path)).uuids for run in ("runs/ours", "runs/theirs")]
    assert held == ["GPU-0000", "GPU-0001"]
    assert Devices("runs/third", folder=tmp_path).acquire("searcher") is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch can use the GPU that is here")
def test_a_run_does_not_train_on_the_cpu_of_a_machine_with_gpus_unless_it_is_told_to(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    set_gpus(monkeypatch, tmp_path, driver="470.1")
    root, name = str(tmp_path / "root"), ["--name", "r"]
    for dry in (["--dry-run"], []):
        assert cli.main(["run", "quickstart", "--root", root, *name, *dry]) == cli.BAD_USAGE
        told = capsys.readouterr().err
        assert "error: model.device: this machine has NVIDIA GPUs, but torch is built " in told
        assert "model.device=cpu, or CUDA_VISIBLE_DEVICES= before a command, computes on the CPU" in told
    assert not Path(root).exists()
    with pytest.raises(ConfigError, match=r"model\.device: this machine has NVIDIA GPUs"):
        local_launcher(run, preset("quickstart"))  # as when a run is resumed
    on_cpu = ["--set", "model.device=cpu", "--dry-run"]
    assert cli.main(["run", "quickstart", "--root", root, *name, *on_cpu]) == 0
    assert local_launcher(run, preset("quickstart").replace({"model.device": "cpu"})).devices.uuids == []


def test_memory_that_another_program_takes_is_told(tmp_path: Path, hold: Hold, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TBA_LOCK_DIR", str(tmp_path))
    (uuid,) = set_gpus(monkeypatch, tmp_path, free=3_000)
    (warning,) = memory_warnings([uuid])
    assert f"only 2.9 of the 79.6 GiB of NVIDIA H100 80GB HBM3 ({uuid}) are free" in warning
    hold(Devices("runs/ours"))
    assert memory_warnings([uuid]) == []  # the role of a run may have taken it
    assert len(memory_warnings([uuid], own=1)) == 1  # as seen by this role, before it has taken any
    hold(Devices("runs/ours"))
    assert memory_warnings([uuid], own=1) == []
    set_gpus(monkeypatch, tmp_path, free=81_000)
    assert memory_warnings([uuid], own=2) == []


@pytest.mark.parametrize(
    ("cuda", "capabilities", "shown", "old"),
    [
        ("13.0", ["7.0", "9.0"], None, ["7.0"]),
        ("13.0", ["6.1", "7.0"], None, ["6.1", "7.0"]),
        ("13.0", ["7.0", "9.0"], "1", []),  # it is hidden
        ("13.0", ["7.5", "12.0"], None, []),
        ("12.8", ["7.0", "9.0"], None, []),
        ("13.0", ["[N/A]", "9.0"], None, []),
        ("99.0", ["1.0", "9.0"], None, []),
    ],
)
def test_gpus_that_are_too_old_for_the_cuda_of_torch_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    cuda: str, capabilities: list[str], shown: str | None, old: list[str],
):  # fmt: skip
    set_gpus(monkeypatch, tmp_path, 2, capabilities=capabilities)
    if shown:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert driver_check.main(["--cuda", cuda]) == bool(old)
    told = capsys.readouterr()
    for it in capabilities:
        assert f"compute capability {it}," in told.out
    named = [f"NVIDIA H100 80GB HBM3 ({it})" for it in old]
    assert (f"needs GPUs of compute capability 7.5 or higher, got {', '.join(named)}: " in told.err) == bool(old)


def test_a_gpu_without_bfloat16_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    set_gpus(monkeypatch, tmp_path, 2, capabilities=["7.5", "8.0"])
    assert driver_check.main(["--cuda", "13.0"]) == 0
    assert capsys.readouterr().out.count("it does not multiply bfloat16, which vLLM needs") == 1


def test_the_check_of_a_machine_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    set_gpus(monkeypatch, tmp_path, 2, driver="570.86.10", free=3_000)
    assert driver_check.main(["--cuda", "13.0"]) == 1
    told = capsys.readouterr()
    assert (
        told.out.count("driver 570.86.10, compute capability 9.0, 2.9 of 79.6 GiB are free")
        == 2
        == told.out.count("another program uses")
    )
    assert "needs a driver of version 580 or newer" in told.err
    set_gpus(monkeypatch, tmp_path)
    assert driver_check.main(["--cuda", "13.0"]) == 0
    assert capsys.readouterr().out.endswith("the driver suffices for CUDA 13.0\n")
    set_tool(tmp_path / "bin", "#!/bin/sh\nexit 9\n")
    assert driver_check.main([]) == 1 and "cannot list the GPUs" in capsys.readouterr().err
