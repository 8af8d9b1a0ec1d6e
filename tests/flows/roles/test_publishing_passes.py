"""How often a sync passes over the bytes of a policy. Each pass takes seconds for a policy of 7 billion weights, so a
further pass must be on purpose. Counted are the bytes that the trainer's own code hashes, reads, writes and maps, per
byte of the published version, which has half of the bytes of the policy."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys, time
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from benchmarks.publishing import byte_counts
byte_counts.install()
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from benchmarks.harness import fakes
from benchmarks.harness.tiny_models import tiny_tokenizer
from storage.local_files.scratch import scratch_folder
from storage.runs.run import Run
from storage.weights.checkpoints import Checkpoints
from storage.weights.versions import Versions
from tba.config import Config
from tba.models.policy import Policy
from tba.train.sync_writer import Copy, SyncWriter
from tba.train.training_state import TrainingState
from tba.types import Version

SIZES = dict(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, vocab_size=8000)
policy = Policy(LlamaForCausalLM(LlamaConfig(**SIZES)), tiny_tokenizer(), torch.device("cpu"))
size = 2 * sum(it.numel() for it in policy.model.parameters())
run = Run.create(sys.argv[1], "run", config={}, sampler_sql="", code_version="")
stages = {}

class Ledger:
    def write(self, sync, steps, *, weights_sha256): ...

def count(name, work):
    with byte_counts.counting() as counts:
        work()
    stages[name] = {kind: round(nbytes / size, 1) for kind, nbytes in asdict(counts).items() if nbytes > size / 20}

def copy(sync):
    moments = {f"{i}.{n}": it for n in ("a", "b") for i, it in enumerate(policy.snapshot().model.parameters())}
    state = TrainingState(step=sync, sync=sync, queues={}, optimizer=moments, random=torch.get_rng_state())
    return Copy(sync=sync, step=sync, snapshot=policy.snapshot(), state=state, publish=True)

with scratch_folder(Path(run.url)) as scratch:
    config = Config().replace({"model.publish_dtype": "bfloat16"})
    made = [Versions(run), Checkpoints(run)]
    syncs = SyncWriter(
        config, attempt=1, ledger=Ledger(), versions=made[0], checkpoints=made[1], lease=fakes.Lease(), scratch=scratch
    )
    with syncs:
        queues = Future()
        queues.set_result({})
        first, second = copy(0), policy.snapshot()
        def sync():
            syncs.write(first, [], queues)
            syncs.finish()
        count("sync with checkpoint", sync)
        count("version", lambda: syncs.publish(second, 1))
    time.sleep(2.1)  # a file that has just been written is verified by every process
    count("first load", lambda: Versions(run).load(Version(1, 1)))
    count("second load", lambda: Versions(run).load(Version(1, 1)))
print(json.dumps(stages))
"""


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    folder = tmp_path_factory.mktemp("passes")
    said = subprocess.run(
        [sys.executable, "-c", SCRIPT, folder],
        env={**os.environ, "TBA_CACHE": str(folder / "cache")},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    return json.loads(said.stdout)


def test_a_version_is_written_and_hashed_once_and_never_read_again(stages: dict[str, dict[str, float]]):
    """Its policy has twice the bytes and is hashed once for the ledger. The version before is mapped once, to find the
    weights that have changed."""
    assert stages["version"] == {"hashed": 1 + 2, "written": 1, "mapped": 1}


def test_a_checkpoint_is_written_and_hashed_once_too(stages: dict[str, dict[str, float]]):
    """It has the policy and two moments of each weight, six bytes per published byte."""
    assert stages["sync with checkpoint"] == {"hashed": 1 + 2 + 6, "written": 1 + 6}


def test_a_version_is_read_and_hashed_once_on_a_host(stages: dict[str, dict[str, float]]):
    assert stages["first load"] == {"hashed": 1, "read": 1}
    assert stages["second load"] == {}
