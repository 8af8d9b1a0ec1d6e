"""A whole run whose versions are adapters."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

import storage
from benchmarks.harness.tiny_models import tiny_folder
from flows.commands import audit, fork
from flows.commands.export_version import export
from flows.planning import create
from flows.roles import model_loading, wiring
from storage.maintenance.check import check
from storage.runs.run import Run
from storage.weights.checkpoints import Checkpoints
from storage.weights.evaluations import Evaluations
from storage.weights.versions import Versions
from tba.config import parse
from tba.errors import ConfigError
from tba.types import Version
from tests.support.flows.live_roles import EVERY, STEPS, broken_off, learned, live, run_all, settings

LORA = {"model.lora_rank": 2, "training.learning_rate": 1e-2}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, base: Path) -> Iterator[Run]:
    run = create.start(settings(base, **LORA), str(tmp_path_factory.mktemp("root")), "whole")
    run_all(run)
    yield run


def test_every_role_works_with_adapters(finished):
    assert check(finished).ok
    assert {0, STEPS // EVERY} <= {version.number for version in Evaluations(finished).done()}
    with storage.connect(finished) as con:
        [(steps, newest)] = con.execute(
            "select (select count(*) from steps), (select max(version_start) from trajectories)"
        ).fetchall()
        worst = con.execute(
            "select max(abs(logp - ref_logp)), max(abs(ref_logp - list_sum(behaviour_logps[:length - finished::int]))) "
            "from draws d join trajectories using (trajectory_id) where d.step = 1"
        ).fetchone()
    assert steps == STEPS and newest > 0
    assert worst and max(worst) < 1e-3, "at first the policy is the reference"


def test_versions_and_checkpoints_hold_the_adapter_alone(finished, base):
    versions = Versions(finished)
    whole = (base / "model.safetensors").stat().st_size
    for version in versions.complete():
        folder = versions.load(version)
        assert {it.name for it in folder.iterdir()} - {"MANIFEST.json"} == {
            "adapter_config.json", "adapter_model.safetensors"
        }  # fmt: skip
        assert sum(it.stat().st_size for it in folder.iterdir()) < whole / 3
    assert len({versions.weights_sha256(it) for it in versions.complete()}) == len(versions.complete())
    newest = Checkpoints(finished).newest()
    assert newest
    checkpoint = Checkpoints(finished).load(newest.number, newest.attempt)
    assert (checkpoint / "optimizer.safetensors").stat().st_size < whole


@pytest.mark.parametrize(("checkpoint", "records"), [(4, 6), (0, 3)])
def test_a_resumed_trainer_takes_the_same_steps(finished, tmp_path, checkpoint, records):
    run = broken_off(finished, tmp_path, after_checkpoint=checkpoint, keep_records=records)
    assert live(run, "trainer", wiring.run_trainer) == []
    replayed = min((records + 1) * EVERY, STEPS)
    assert learned(run)[:replayed] == learned(finished)[:replayed]
    assert check(run).ok


def test_a_step_can_be_audited_and_a_fork_can_start_from_a_checkpoint(finished):
    assert audit.audit(finished, 7).ok
    with pytest.raises(ConfigError, match=r"model\.lora_rank is shared with the parent"):
        fork.fork(finished, 8, {"model.lora_rank": 4})
    forked = fork.fork(finished, 8, {"training.learning_rate": 1e-3}, name="fork", replay=True)
    assert live(forked, "trainer", wiring.run_trainer) == []
    assert check(forked).ok


def test_another_base_is_refused(finished, tmp_path):
    run = broken_off(finished, tmp_path, after_checkpoint=4, keep_records=6)
    config = parse(run.config).replace({"model.path": str(tiny_folder(tmp_path / "other", seed=1))})
    for load in (
        lambda: model_loading.load_start(run, config),
        lambda: model_loading.load_checkpoint(run, config, Version(4, 1)),
    ):
        with pytest.raises(ConfigError, match=r"model.path: the adapter in .* is for weights with sha256"):
            load()


def test_an_exported_version_computes_the_same_as_base_and_adapter(finished, tmp_path, capfd):
    config, last = parse(finished.config), max(Versions(finished).complete(), key=lambda it: it.order)
    adapter = model_loading.find_adapter(finished, config)
    policy = model_loading.load_policy(config, adapter, Versions(finished).load(last))
    logging.enable_progress_bar()
    capfd.readouterr()
    merged = export(finished, last.number, None, str(tmp_path / "merged"))
    assert capfd.readouterr() == ("", "")
    plain = AutoModelForCausalLM.from_pretrained(merged).eval()
    tokens = torch.tensor([[5, 9, 13, 7, 20, 4]])
    with torch.no_grad():
        torch.testing.assert_close(plain(tokens).logits, policy.model(tokens).logits, rtol=1e-4, atol=1e-4)
    assert (merged / "tokenizer.json").exists() and not (merged / "adapter_config.json").exists()
    alone = export(finished, last.number, None, str(tmp_path / "adapter"), adapter=True)
    assert {it.name for it in alone.iterdir()} >= {"adapter_config.json", "adapter_model.safetensors"}
    again = model_loading.load_policy(config, adapter, alone)
    assert again.snapshot().sha256 == policy.snapshot().sha256


def test_a_run_without_adapters_has_none_to_export(tmp_path, base):
    run = create.start(settings(base), str(tmp_path), "plain")
    with pytest.raises(ConfigError, match="--adapter: plain has no adapters"):
        export(run, 0, None, str(tmp_path / "out"), adapter=True)
