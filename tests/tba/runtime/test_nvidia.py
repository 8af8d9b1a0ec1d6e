"""The NVIDIA GPUs of a machine are found. A script takes the place of nvidia-smi, and a folder that of /dev."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tba.errors import ConfigError, RunFailed
from tba.runtime.nvidia import cuda_of_torch, fault, memory_of, nvidia_devices, parse_listing, query_gpus, refuse_cpu
from tests.support.nvidia import set_gpus, set_machine, set_tool
from tests.support.pages import ROOT


def test_devices_are_listed_by_the_names_that_cuda_accepts():
    listing = (
        "GPU 0: NVIDIA H200 (UUID: GPU-11)\n"
        "GPU 1: NVIDIA H200 (UUID: GPU-22)\n"
        "  MIG 1g.18gb     Device  0: (UUID: MIG-33)\n"
        "  MIG 1g.18gb     Device  1: (UUID: MIG-44)\n"
    )
    assert parse_listing(listing) == [["GPU-11"], ["MIG-33", "MIG-44"]]
    assert parse_listing("No devices found.\n") == []


@pytest.mark.parametrize(
    ("shown", "devices"),
    [
        (None, ["MIG-0000-0", "MIG-0000-1", "MIG-0001-0", "MIG-0001-1"]),
        ("1", ["MIG-0001-0", "MIG-0001-1"]),
        ("MIG-0001-0,MIG-0000", ["MIG-0001-0", "MIG-0000-0", "MIG-0000-1"]),
        ("", []),
        ("-1", []),
        ("7", []),
    ],
)
def test_a_process_uses_the_devices_that_cuda_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shown: str | None, devices: list[str]
):
    set_gpus(monkeypatch, tmp_path, 2, instances=2)
    if shown is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", shown)
    assert nvidia_devices() == devices


def test_sizes_and_versions_are_those_that_the_driver_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    set_gpus(monkeypatch, tmp_path, 2, driver="570.86.10", free=3_000)
    assert memory_of(["GPU-0001", "GPU-0000"]) == [81559 * 2**20] * 2
    assert memory_of(["MIG-0000-0"]) == []
    assert [(gpu.driver, gpu.free >> 20, gpu.is_taken) for gpu in query_gpus()] == [("570.86.10", 3_000, True)] * 2
    set_tool(tmp_path / "bin", "#!/bin/sh\nexit 9\n")
    assert (memory_of(["GPU-0000"]), query_gpus()) == ([], [])


def test_in_wsl2_the_tools_are_beside_the_path_and_no_file_tells_the_number_of_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert (
        set_gpus(monkeypatch, tmp_path, 2, files=["dxg"], tools="wsl") == nvidia_devices() == ["GPU-0000", "GPU-0001"]
    )
    set_tool(tmp_path / "wsl", "#!/bin/sh\nexit 9\n")
    with pytest.raises(RunFailed, match=r"nvidia-smi cannot list the GPUs: .*; model\.device=cpu trains without GPUs"):
        nvidia_devices()


def test_the_tools_of_a_driver_without_a_gpu_are_no_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    tools = set_machine(monkeypatch, tmp_path)
    assert nvidia_devices() == []
    set_tool(tools, "#!/bin/sh\nexit 9\n")
    assert nvidia_devices() == []
    refuse_cpu("model.device", None)
    set_machine(monkeypatch, tmp_path, files=["nvidia0"])
    with pytest.raises(RunFailed, match="cannot list the GPUs"):
        nvidia_devices()


@pytest.mark.parametrize(
    ("cuda", "driver", "expected"),
    [
        (None, "580.95.05", "torch is built without CUDA: `make install-gpu`"),
        ("13.0", "570.86.10", "CUDA 13.0, which needs a driver of version 580 or newer, and the driver is 570.86.10"),
        ("13.0", "580.95.05", ""),
        ("13.2", "610.1", ""),
        ("12.8", "520.61", "CUDA 12.8, which needs a driver of version 525 or newer"),
        ("12.8", "570.86.10", ""),
        ("99.0", "570.86.10", ""),
    ],
)
def test_a_driver_that_is_too_old_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cuda: str | None, driver: str, expected: str
):
    set_gpus(monkeypatch, tmp_path, driver=driver)
    assert expected in fault(cuda) if expected else fault(cuda) == ""
    if expected:
        with pytest.raises(ConfigError, match=r"^task\.options\.victim_device: this machine has NVIDIA GPUs, but .*"):
            refuse_cpu("task.options.victim_device", cuda)


def test_a_torch_that_works_is_not_refused_for_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The package of CUDA's forward compatibility brings a newer driver beside the installed one."""
    set_gpus(monkeypatch, tmp_path, driver="535.0")
    refuse_cpu("model.device", "13.0", torch_works=lambda: True)
    with pytest.raises(ConfigError, match="the driver is 535"):
        refuse_cpu("model.device", "13.0", torch_works=lambda: False)


def test_the_cpu_is_refused_only_where_a_process_may_use_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    set_gpus(monkeypatch, tmp_path)
    refuse_cpu("model.device", "13.0")
    with pytest.raises(ConfigError, match=r"but torch finds none; model\.device=cpu, or CUDA_VISIBLE_DEVICES= before"):
        refuse_cpu("model.device", "13.0", "torch finds none")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    with pytest.raises(ConfigError, match="but CUDA_VISIBLE_DEVICES=7 names none of them"):
        refuse_cpu("model.device", "13.0", "torch finds none")
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        refuse_cpu("model.device", None, "torch finds none")


def test_a_device_file_without_tools_is_a_gpu_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    set_machine(monkeypatch, tmp_path, files=["nvidia0"])
    with pytest.raises(ConfigError, match="torch is built without CUDA"):
        refuse_cpu("model.device", None, "torch finds none")


def test_the_cuda_of_torch_is_known_without_importing_it():
    assert cuda_of_torch() == torch.version.cuda


def test_the_module_needs_only_python_itself():
    """`make install-gpu` runs it before anything is installed."""
    command = [sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {CHECKS}"]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PATH": "/nowhere"})
    assert checked.returncode == 0 and "no NVIDIA GPUs here" in checked.stdout, checked.stderr


CHECKS = "from flows import driver_check; sys.exit(driver_check.main(['--cuda', '13.0']))"
