"""Plans of main memory: what each role takes there, and whether a machine has enough."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.harness.tiny_models import tiny_folder
from flows.planning import fit_to_gpus, role_main_memory, role_memory
from flows.planning.fit_to_gpus import fit, warning
from flows.planning.memory_plan import Gpus, fits, plan
from flows.planning.model_sizes import KNOWN
from flows.planning.nearest_settings import nearest
from flows.planning.plan_table import table
from tba.errors import ConfigError
from tba.models.policy import Policy
from tba.presets import preset
from tba.runtime import host_copies, parking
from tba.train.learner import Learner

RHO, LARGE = KNOWN["realtreetune/rho-1b-sft-GSM8K"], KNOWN["Qwen/Qwen2.5-7B"]
SINGLE = Gpus.parse("1x80")
SHIFTS = {"model.gpu_shifts": True, "search.searchers": 1}


def parts_of(role: str, changes: dict[str, Any], name: str = "gsm8k") -> role_memory.Parts:
    return plan(preset(name).replace(changes), RHO, SINGLE).in_main_memory[role]


@pytest.mark.parametrize("changes", [{}, {"objective.reference_reset": 1}, {"objective.name": "ppo"}], ids=str)
def test_a_trainer_between_shifts_keeps_what_is_planned(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    """On this CPU, tensors are parked as if they were on a GPU."""
    monkeypatch.setattr(parking, "is_away", lambda tensor: True)
    config = preset("quickstart").replace({"model.device": "cpu", **SHIFTS, **changes})
    policy = Policy.load(tiny_folder(tmp_path))
    learner = Learner(config, policy)
    for trained in learner.all_trained():
        for parameter in trained.parameters:
            parameter.grad = torch.ones_like(parameter)
        trained.optimizer.step()
    if config.objective.reference_reset:
        learner.reference = parking_reference(policy)
    learner.parking.park()
    kept = sum({id(it.tensor): it.tensor.nbytes for it in learner.parking.parked}.values())
    size = sum(it.numel() for it in policy.model.parameters())
    model = replace(RHO, parameters=size, outside=0)
    assert kept == pytest.approx(role_main_memory.trainer(config, model)["parked"], rel=0.02)


def parking_reference(policy: Policy) -> Any:
    from tba.train.moving_reference import MovingReference

    return MovingReference(policy.twin())


def test_what_roles_park_counts_only_in_shifts():
    assert all("parked" not in parts_of(role, {}) for role in ("trainer", "searcher-0", "evaluator"))
    searcher, evaluator = (parts_of(role, SHIFTS)["parked"] for role in ("searcher-0", "evaluator"))
    policy = 2 * RHO.parameters
    assert searcher == policy + role_memory.scorer_weights(preset("gsm8k"), RHO) and evaluator == policy
    rounded = parts_of("evaluator", {**SHIFTS, "engine.quantization": "fp8"})["parked"]
    assert rounded == RHO.layers * RHO.block + 2 * RHO.outside


def test_models_of_a_task_count_where_they_are():
    on_gpu, on_cpu = (parts_of("searcher-0", {"task.options.device": it}, "tldr") for it in ("auto", "cpu"))
    reward = 4 * KNOWN["mnoukhov/pythia410m-rm-tldr6.9b"].parameters
    assert "models of the task" not in on_gpu
    model = KNOWN["mnoukhov/pythia410m-sft-tldr"]
    config = preset("tldr").replace({"task.options.device": "cpu", **SHIFTS})
    assert plan(config, model, SINGLE).in_main_memory["searcher-0"]["models of the task"] == reward
    assert "models of the task" in on_cpu or "policy while it loads" in on_cpu


def test_moments_in_main_memory_and_copies_that_are_stored_count():
    size = RHO.parameters
    usual, hosted = parts_of("trainer", {}), parts_of("trainer", {"training.optimizer": "adamw-on-host"})
    assert usual["copy of a version"] == 4 * size and usual["copy of a checkpoint"] == 12 * size
    assert "AdamW" not in usual
    assert hosted["AdamW"] == 8 * size + 2 * 4 * RHO.vocabulary * RHO.hidden, "and a buffer for weight and gradient"


def test_large_matrices_take_blocks_of_pinned_memory_of_powers_of_two():
    assert role_main_memory.ROOM_BYTES == host_copies.ROOM_BYTES
    parts = role_main_memory.trainer(preset("math"), LARGE)
    wasted = 2 * (2**32 - 4 * LARGE.vocabulary * LARGE.hidden)  # the embedding and the output layer
    assert parts["copy of a version"] == 4 * LARGE.parameters + wasted


def test_a_role_counts_its_policy_while_it_loads_if_it_takes_less_later():
    assert parts_of("searcher-0", {}) == {
        "processes": 2 * role_main_memory.PROCESS, "policy while it loads": 4 * RHO.parameters
    }  # fmt: skip


# --- whether it fits --------------------------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The size of the GPU and of the main memory that this machine seems to have."""
    sizes = {"gpu": 80 * 2**30, "main": 2**40}
    monkeypatch.setattr(fit_to_gpus, "usable", lambda config: ["GPU-a"])
    monkeypatch.setattr(fit_to_gpus, "memory_of", lambda uuids: [sizes["gpu"]])
    monkeypatch.setattr(fit_to_gpus, "main_memory", lambda: sizes["main"])
    monkeypatch.setattr(fit_to_gpus, "find_spec", lambda name: object())
    return sizes


def test_a_run_is_refused_where_the_main_memory_is_too_small(machine: dict[str, int]):
    config = preset("gsm8k")
    assert fit(config, "here")[1] == fit(config, "1x80", runs_here=True)[1]
    machine["main"] = 4 * 10**9
    for asked in ("here", "1x80"):
        with pytest.raises(ConfigError, match=r"(?m)^main memory: [\d.]+ GB of 3\.8 GB, does not fit$"):
            fit(config, asked, runs_here=True)
    assert fit(config, "1x80")[1], "the main memory of another machine is unknown"


def test_of_too_little_main_memory_a_warning_tells(machine: dict[str, int]):
    config = preset("redteam")
    on, _ = fit(config.replace({"engine.memory_fraction": 0.1}), None)
    assert warning(config, on) == ""
    machine["main"] = 4 * 10**9
    on, changes = fit(config, None)
    assert changes == {} and "main memory: " in warning(config, on)


def test_settings_that_fill_main_memory_are_left_out_where_it_is_small():
    config, small = preset("gsm8k"), Gpus.parse("1x24")
    changes = nearest(config, RHO, small)
    assert changes and changes["model.gpu_shifts"]
    tight = replace(small, main_memory=plan(config.replace(changes), RHO, small).main_memory_needed)
    instead = nearest(config, RHO, tight)
    assert instead and "model.gpu_shifts" not in instead and fits(config.replace(instead), RHO, tight)


def test_the_table_says_what_each_role_takes_of_main_memory():
    lines = list(table(preset("gsm8k"), RHO, replace(SINGLE, main_memory=10**12)))
    [at] = [i for i, line in enumerate(lines) if line.startswith("main memory: ")]
    assert lines[at].endswith(" GB of 950 GB, fits")
    assert lines[at + 1].startswith("  trainer ") and ", copy of a version 4.4 GB, copy" in lines[at + 1]
    assert lines[at + 2] == "  searcher-0 to evaluator, each 7.4 GB: processes 3 GB, policy while it loads 4.4 GB"
