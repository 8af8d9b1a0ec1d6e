"""GSM8K with whole roles on real storage, and the intake of its original data."""

from pathlib import Path

import pytest

from benchmarks.harness.tiny_models import tiny_folder
from flows.planning import create
from flows.roles import prompt_intake
from storage.log.prompts import read_prompts
from storage.maintenance.check import check
from storage.runs.events import Events
from tba.config import parse
from tba.models.policy import Policy
from tba.tasks.registry import get_task
from tests.support.flows.live_roles import rows, run_all
from tests.support.flows.prompt_examples import gsm8k, word_problems
from tests.support.original_data import original_data


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("policy") / "tiny")


def test_gsm8k_runs_with_a_rule_and_a_template_of_choice(policy, tmp_path):
    train, test = (word_problems(tmp_path, split, 20) for split in ("train", "test"))
    run = create.start(gsm8k(policy, train, test), str(tmp_path), "gsm8k")
    run_all(run)
    assert check(run).ok
    assert rows(run, "select split, count(*) from prompts group by 1 order by 1") == [("test", 20), ("train", 20)]
    assert rows(run, "select bool_and(prompt like '[MATH_TASK] Problem:%Solution:') from trajectories") == [(True,)]
    reasons = "they have more than 512 tokens (search.max_prompt_tokens), or the task has a reason of its own"
    assert rows(run, "select message from events where kind = 'prompts-left-out' order by 1") == [
        (f"1 of 21 rows of split '{split}' made no prompt: {reasons}",) for split in ("test", "train")
    ]


def test_gsm8k_takes_the_original_data_whole(policy, tmp_path):
    folder = original_data("gsm8k")
    run = create.start(gsm8k(policy, folder / "train.jsonl", folder / "test.jsonl"), str(tmp_path), "original")
    config = parse(run.config)
    prompt_intake.store_prompts(
        run, config, get_task(config.task), Policy.load(policy, device="cpu").tokenizer, Events(run, "trainer", 1)
    )
    assert [len(read_prompts(run, split)) > 1000 for split in ("train", "test")] == [True, True]
