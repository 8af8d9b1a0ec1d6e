"""`tba run` with searcher and evaluator on real engines of vLLM. A killed role leaves no process of its engine, and the
stored log-probabilities are those of the policy."""

import json
import os
import signal
import subprocess
import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import storage
from flows.commands.export_version import export
from storage.maintenance.check import check
from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.types import Version
from tests.support.flows.closeness import distance
from tests.support.flows.command_line import DEADLINE, lease_at, opened, tba
from tests.support.flows.roles import TINY
from tests.support.vllm import ON_CPU, SIMILAR, descendants, needs_vllm, served_folder
from tests.support.waiting import until

pytestmark = [*needs_vllm, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 8
BY_PLAIN_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
folder, prompts, options = map(json.loads, sys.argv[1:])
if __name__ == "__main__":
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = LLM(folder, dtype="float32", enforce_eager=True, max_model_len=64, **options).generate(prompts, greedy)
    print(json.dumps([[list(it.prompt_token_ids), list(it.outputs[0].token_ids)] for it in found]))
"""
PROMPTS = ["1+1=", "12+34=", "7+8=", "90+9="]
SETTINGS = {
    **TINY,
    "engine.name": "vllm",
    "engine.cache_gigabytes": 0.25,
    "engine.profile": "safe",  # compiling takes a minute on a GPU
    "sync.every": 2,
    "sync.lag": 0,  # so that the searcher adopts every version
    "sync.keep_versions": STEPS,
    "search.temperature": 1.0,
    "search.top_p": 0.9,
    "training.learning_rate": 1e-2,  # so that versions differ
    "limits.silent_after": 120,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("vllm")
    log, policy = folder / "tba.log", served_folder(folder / "policy")
    changes = [f"{key}={value}" for key, value in {"model.path": policy, **SETTINGS}.items()]
    command = tba(
        "run", "quickstart", "--root", str(folder), "--name", "r", "--steps", str(STEPS), "--set", *changes, log=log
    )
    run = until(lambda: opened(f"{folder}/runs/r"), "the run is created", DEADLINE, log=log)
    # Three roles load vLLM first, which takes minutes on a busy machine.
    until(lambda: lease_at(run, "trainer", step=4), "the trainer takes four steps", 280, log=log)
    searcher = until(lambda: lease_at(run, "searcher-000"), "the searcher starts", DEADLINE, log=log).pid
    engine = [pid for pid in descendants(searcher) if "VLLM" in name_of(pid)]
    assert len(engine) >= (2 if ON_CPU else 1), "the engine and, on a CPU, its worker"
    os.kill(searcher, signal.SIGKILL)
    until(lambda: not any(name_of(pid) for pid in engine), "the engine ends after its searcher", DEADLINE, log=log)
    assert command.wait(280) == 0, log.read_text()[-3000:]
    return run


def test_the_run_is_whole_and_every_role_reports_its_engine(finished: Run):
    assert check(finished).ok
    with storage.connect(finished) as con:
        assert con.execute("select count(*), max(step) from steps").fetchall() == [(STEPS, STEPS)]
        assert con.execute("select min(version), max(version) from evaluations").fetchall() == [(0, STEPS // 2)]
        off = "select count(distinct version), max(value) from evaluations where metric = 'greedy_mismatch_max'"
        [(versions, mismatch)] = con.execute(off).fetchall()
        chosen = con.execute("select role, life, message from events where kind = 'engine-chosen'").fetchall()
        starts = con.execute("select distinct message, data from events where kind = 'engine-starts'").fetchall()
    assert versions >= 2 and 0 < mismatch < SIMILAR / 2
    plain = {"profile": "safe", "model_runner": 1, "async_scheduling": False, "compilation": "NONE",
             "cuda_graphs": "NONE", "dtype": "float32", "quantization": None}  # fmt: skip
    assert starts and all(plain.items() <= json.loads(data).items() for _, data in starts)
    if torch.cuda.device_count() == 1:
        assert all(it.startswith("vLLM takes 0.2 of the memory of its GPU, which 3 roles share;") for it, _ in starts)
    said = "responses come from vllm: engine.name says so"
    assert sorted(chosen) == [("evaluator", 1, said), ("searcher-000", 1, said), ("searcher-000", 2, said)]


def test_each_round_is_by_its_version_and_stores_the_log_probabilities_before_top_p_cuts(finished: Run):
    with storage.connect(finished) as con:
        rows = con.execute(
            "select round, version_start, version_end, prompt_tokens, response_tokens, behaviour_logps "
            "from trajectories order by round"
        ).fetchall()
    versions = Versions(finished)
    for round, of_round in groupby(rows, key=lambda row: row[0]):
        version = Version(round, 1)
        found = list(of_round)
        assert {(row[1], row[2]) for row in found} == {(round, round)}
        assert distance(versions.load(version), found) < SIMILAR / 2
    assert distance(versions.load(Version(0, 1)), found) > max(0.01, SIMILAR)


def test_an_exported_folder_says_the_same_in_vllm_and_in_transformers(finished: Run, tmp_path: Path):
    """Both load the folder by its path alone, as other programs do."""
    folder = str(export(finished, STEPS // 2, None, str(tmp_path / "exported")))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    read = [tokenizer(text)["input_ids"] for text in PROMPTS]
    said = [
        model.generate(torch.tensor([row]), do_sample=False, max_new_tokens=12, eos_token_id=None)[0, len(row) :]
        for row in read
    ]
    assert by_plain_vllm(folder, tmp_path) == [[a, b.tolist()] for a, b in zip(read, said, strict=True)]
    assert len({tuple(it.tolist()) for it in said}) == len(PROMPTS)


def by_plain_vllm(folder: str, tmp_path: Path) -> list[list[list[int]]]:
    """Return the tokens that plain vLLM reads of each prompt, and the tokens that it generates."""
    program = tmp_path / "plain.py"
    program.write_text(BY_PLAIN_VLLM)
    options = {"kv_cache_memory_bytes": 2**28} if ON_CPU else {"gpu_memory_utilization": 0.2}
    given = [json.dumps(it) for it in (folder, PROMPTS, options)]
    quiet = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(
        [sys.executable, str(program), *given], env=quiet, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def name_of(pid: int) -> str:
    """Return the command line of a process. Empty if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""
