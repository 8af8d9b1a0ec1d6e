"""Roles compute and store the same on a GPU as on a CPU. `make gpu-check` runs these tests on a GPU."""

from pathlib import Path
from typing import get_args

import pytest
import torch

import storage
from benchmarks.harness.fetched import fetched_of
from benchmarks.harness.tiny_models import EOS_ID, tiny_folder, trajectory
from storage.maintenance.check import check
from storage.weights.versions import Versions
from tba.config import Config, OptimizerName, TrainingConfig
from tba.generation.requests import generate
from tba.generation.transformers_generator import TransformersGenerator
from tba.models.policy import Policy, PolicyScorer
from tba.train.learner import Learner
from tba.train.optimizers import make_optimizer
from tba.train.training_state import optimizer_tensors, restore_optimizer
from tba.types import Version
from tests.support.devices import CUDA, DEVICES
from tests.support.flows.closeness import distance
from tests.support.flows.command_line import opened, tba
from tests.support.flows.roles import TINY
from tests.support.models.vllm_examples import prompts_of

V0 = Version(0, 1)
PROMPTS = prompts_of(["1+2=", "what is it that you want?", "z", "7" * 100])
SEEDS = [list(range(8))] * len(PROMPTS)
FAULT = 1e-3  # float32 log-probabilities that differ by more belong to different policies


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "on_average", "at_most"), [("float32", FAULT, FAULT), ("bfloat16", 0.15, 2.0)])
def test_the_generator_records_the_log_probabilities_that_the_trainer_computes(
    tmp_path: Path, device: str, dtype: str, on_average: float, at_most: float
):
    """The trainer computes in float32, whatever the generator's dtype. Another policy gives other log-probabilities."""
    folders = [tiny_folder(tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    generator = TransformersGenerator(device=device, dtype=dtype, batch_responses=12, max_response_tokens=40)
    generator.adopt(folders[0], V0)
    groups = generate(generator, PROMPTS, SEEDS, temperature=0.8)
    told = torch.tensor([logp for group in groups for response in group for logp in response.logps])
    away = []
    for folder in folders:
        scorer = PolicyScorer(Policy.load(folder, device=device), V0)
        scored = scorer.token_logps(PROMPTS, groups, temperature=0.8)
        away.append((told - torch.tensor([logp for group in scored for logps in group for logp in logps])).abs())
    assert away[0].mean() < on_average and away[0].max() < at_most
    assert away[1].mean() > 1


@pytest.mark.parametrize("device", DEVICES)
def test_a_step_has_the_loss_and_the_gradient_of_the_cpu(tmp_path: Path, device: str):
    """The rewards of the batch differ, so that there is a gradient."""
    rows = fetched_of([trajectory(reward=float(i % 2), response_tokens=(5, 6 + i, 9, EOS_ID)) for i in range(4)])
    folder, config = tiny_folder(tmp_path), Config().replace({"training.responses_per_prompt": 2})
    found = []
    for where in ("cpu", device):
        learner = Learner(config, Policy.load(folder, device=where))
        learned = learner.learn(1, learner.collate(rows))
        gradient = torch.cat(
            [it.grad.flatten().cpu() for it in learner.policy.model.parameters() if it.grad is not None]
        )
        found.append((learned.metrics["loss"], learned.metrics["grad_norm"], gradient))
    (loss, norm, gradient), (loss_there, norm_there, gradient_there) = found
    assert norm > 0.1 and norm_there == pytest.approx(norm, rel=1e-3)
    assert loss_there == pytest.approx(loss, rel=1e-3)
    assert float((gradient_there - gradient).norm()) < 1e-3 * norm


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_an_optimizer_moves_weights_as_on_the_cpu_and_keeps_its_state_where_it_says(name: OptimizerName, device: str):
    """It also continues from its stored state."""
    chance, training, found = torch.Generator().manual_seed(0), TrainingConfig(optimizer=name), []
    start_NC, gradients = torch.randn(50, 300, generator=chance), torch.randn(4, 50, 300, generator=chance)
    for where in ("cpu", device):
        weight = torch.nn.Parameter(start_NC.to(where, copy=True))  # an optimizer changes it in place
        optimizer = make_optimizer([weight], training, learning_rate=1e-2)
        for step, gradient in enumerate(gradients):
            if step == 2:
                stored = optimizer_tensors(optimizer)
                optimizer = make_optimizer([weight], training, learning_rate=1e-2)
                restore_optimizer(optimizer, stored)
            weight.grad = gradient.to(where)
            optimizer.step()
        held = {it.device.type for key, it in optimizer.state[weight].items() if key != "step"}
        assert held == {"cpu" if name == "adamw-on-host" else where}
        found.append(weight.detach().cpu())
    differs = (found[0] - found[1]).abs()
    assert differs.mean() < 1e-6 and differs.max() < 2e-3  # a number between two 8-bit levels may be rounded to either


STEPS = 8


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.long), CUDA])
def test_a_run_goes_from_its_base_policy_to_its_last_scores(
    tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
):
    """On a GPU, quickstart makes the base policy. On a CPU that takes minutes, so the test brings its own."""
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "cache"))
    settings = {**TINY, "model.device": device, "engine.name": "transformers", "sync.keep_versions": STEPS}
    if device == "cpu":
        settings["model.path"] = str(tiny_folder(tmp_path / "policy"))
    changes = [f"{name}={value}" for name, value in settings.items()]
    log, options = tmp_path / "tba.log", ["--root", str(tmp_path), "--name", "r", "--steps", str(STEPS)]
    command = tba("run", "quickstart", *options, *(part for it in changes for part in ("--set", it)), log=log)
    assert command.wait(500) == 0, log.read_text()[-3000:]
    run = opened(f"{tmp_path}/runs/r")
    assert run and check(run).ok
    with storage.connect(run) as con:
        assert con.execute("select count(*), max(step) from steps").fetchall() == [(STEPS, STEPS)]
        assert con.execute("select min(version), max(version) from evaluations").fetchall() == [(0, STEPS // 2)]
        rows = con.execute(
            "select round, version_start, version_end, prompt_tokens, response_tokens, behaviour_logps "
            "from trajectories where version_start = 0"
        ).fetchall()
    assert rows and distance(Versions(run).load(V0), rows) < FAULT
