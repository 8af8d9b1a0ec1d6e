"""`tba resume --gpus` and `tba fork --gpus` plan the memory of a run as `tba run --gpus` does."""

import re
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from flows.commands import fork, resume
from flows.planning import create, fit_to_gpus
from flows.planning.fit_to_gpus import refuse_too_large, with_searchers
from storage.runs.control import change_state
from storage.runs.run import Run
from tba.errors import ConfigError
from tba.presets import preset


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the GPUs that this machine seems to have, with enough main memory and with vLLM."""
    sizes = [24 * 2**30]
    monkeypatch.setattr(fit_to_gpus, "usable", lambda config: [f"GPU-{i}" for i in range(len(sizes))])
    monkeypatch.setattr(fit_to_gpus, "memory_of", lambda uuids: sizes)
    monkeypatch.setattr(fit_to_gpus, "main_memory", lambda: 2**40)
    monkeypatch.setattr(fit_to_gpus, "find_spec", lambda name: object())
    return sizes


@pytest.fixture
def resumed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs that `tba resume` goes on with."""
    urls: list[str] = []
    monkeypatch.setattr(resume, "supervise", lambda run, **_: urls.append(run.url) or 0)
    return urls


def stored(root: Path, changes: dict[str, Any] | None = None) -> Run:
    return create.start(preset("gsm8k").replace(changes or {}), str(root), "first")


def test_a_run_that_does_not_fit_is_not_resumed_on_these_gpus(
    tmp_path: Path, gpus: list[int], resumed: list[str], capsys: pytest.CaptureFixture[str]
):
    run = stored(tmp_path)
    for asked in ("here", "1x24"):
        assert main(["resume", run.url, "--gpus", asked]) != 0
        told = capsys.readouterr().err
        assert re.search(r"a run keeps its settings; a fork fits with --set .*model\.gpu_shifts=true", told)
        assert "model.lora_rank" not in told and "GPU 0: " in told
    assert resumed == []
    gpus[0] = 2**40
    assert main(["resume", run.url, "--gpus", "here"]) == 0
    assert resumed == [run.url]


def test_a_resumed_run_that_does_not_fit_on_this_machine_is_warned_of(
    tmp_path: Path, gpus: list[int], resumed: list[str], capsys: pytest.CaptureFixture[str]
):
    run = stored(tmp_path)
    assert main(["resume", run.url]) == 0
    advice = f"; a run keeps its settings; `tba fork {run.url} --step N --gpus here` looks for settings that do:"
    assert f"warning: by plan the run does not fit on 1x24{advice}" in capsys.readouterr().err
    gpus.clear()
    assert main(["resume", run.url]) == 0
    assert "warning" not in capsys.readouterr().err


def test_the_searchers_that_a_run_has_now_count(tmp_path: Path, gpus: list[int], resumed: list[str]):
    gpus[0] = 80 * 2**30
    run = stored(tmp_path, {"engine.memory_fraction": 0.1})
    assert main(["resume", run.url, "--gpus", "here"]) != 0
    change_state(run, searchers=1)
    assert main(["resume", run.url, "--gpus", "here"]) == 0


def test_a_resumed_run_in_step_is_told_only_of_settings_that_a_fork_of_it_can_have(
    tmp_path: Path, gpus: list[int], resumed: list[str], capsys: pytest.CaptureFixture[str]
):
    changes = {"model.path": "Qwen/Qwen2.5-1.5B", "search.searchers": 2, "search.prompts_per_round": 16}
    in_step = preset("math").replace(changes)
    gpus[0] = 80 * 2**30
    run = create.start(in_step, str(tmp_path), "first")
    assert in_step.sync.lag is not None and "search.searchers" in fit_to_gpus.fit(in_step, "here")[1]
    assert main(["resume", run.url, "--gpus", "here"]) != 0
    told = capsys.readouterr().err
    assert "a fork fits with --set " in told and "search.searchers" not in told
    assert resumed == []


def test_a_fork_is_changed_so_that_it_fits_but_keeps_what_it_shares_with_its_parent(
    gpus: list[int], capsys: pytest.CaptureFixture[str]
):
    config = preset("gsm8k")
    changes = fork.fit_fork(config, "here", {}, replay=False, starts=True)
    assert changes["model.gpu_shifts"] and not [it for it in changes if it.startswith(fork.FIXED)]
    assert "to fit on 1x24: " in capsys.readouterr().err
    assert "training.optimizer" not in fork.fit_fork(
        config, "1x80", {"training.optimizer": "adamw"}, replay=False, starts=False
    )
    with pytest.raises(ConfigError, match="nor with any settings"):
        fork.fit_fork(preset("math"), "1x80", {}, replay=False, starts=False)  # only adapters would fit


def test_a_fork_in_step_with_its_parent_keeps_its_searchers_and_a_replay_has_none(gpus: list[int]):
    config = preset("math").replace({"model.path": "Qwen/Qwen2.5-1.5B"})
    assert "search.searchers" not in fork.fit_fork(config, "8x80", {}, replay=False, starts=False)
    assert with_searchers(preset("gsm8k"), 0).search.searchers == 0
    assert with_searchers(config, 0) == config
    usual, replay = (fork.fit_fork(preset("gsm8k"), "1x80", {}, replay=it, starts=False) for it in (False, True))
    assert "search.searchers" in usual and "search.searchers" not in replay


def test_without_gpus_here_nothing_is_planned_for_a_run_that_starts_elsewhere(gpus: list[int]):
    gpus.clear()
    assert fork.fit_fork(preset("math"), None, {}, replay=False, starts=True) == {}
    with pytest.raises(ConfigError, match=r"^--gpus: roles may use 0 GPUs"):
        refuse_too_large(preset("gsm8k"), "1x80")
