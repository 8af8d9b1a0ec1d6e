"""MATH with whole roles on real storage: searcher and evaluator have answers in boxes graded by algebra."""

import json
import re
from pathlib import Path

import pytest
import torch

from benchmarks.harness.tiny_models import tiny_llama, tiny_tokenizer
from flows.planning import create, resolve
from storage.log.prompts import read_prompts
from storage.maintenance.check import check
from storage.runs.run import Run
from tba.models.policy import Policy
from tests.support.flows.live_roles import rows, run_all

CHARACTERS = "0123 "
RIGHT, WRONG = ("2", "1+1", r"\frac{4}{2}"), ("3", r"\frac{1}{2}")
BOXES = [f"\\boxed{{{answer}}}" for answer in (*RIGHT, *WRONG)]
BOX = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")


def policy_folder(folder: Path) -> Path:
    """Save a policy for which each box is one token, so that it writes many boxes without any training."""
    tokenizer = tiny_tokenizer(CHARACTERS)
    tokenizer.add_tokens(BOXES)
    model = tiny_llama(characters=CHARACTERS + "x" * len(BOXES))
    Policy(model, tokenizer, torch.device("cpu")).snapshot().save(folder)
    return folder


def problems(folder: Path, split: str) -> Path:
    """Write twenty problems, four of each level."""
    found = [
        {"problem": f"In {split}, what is {n} less {n - 2}?", "answer": "2", "level": f"Level {n % 5 + 1}"}
        for n in range(2, 22)
    ]
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, found)))
    return folder / f"{split}.jsonl"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("math")
    changes = {
        "model.path": str(policy_folder(folder / "policy")),
        "model.publish_dtype": "float32",
        "model.threads": 1,
        "task.train": str(problems(folder, "train")),
        "task.test": str(problems(folder, "test")),
        "task.options.levels": [1, 3, 4, 5],
        "objective.reference_reset": 2,
        "search.searchers": 1,
        "search.responses_per_prompt": 8,
        "search.prompts_per_round": 4,
        "search.max_prompt_tokens": 256,
        "search.max_response_tokens": 8,
        "search.initial_fill": 32,
        "search.shuffle": False,
        "search.remembered_rewards": 100,
        "training.steps": 4,
        "training.prompts_per_step": 2,
        "training.responses_per_prompt": 8,
        "training.learning_rate": 1e-3,
        "evaluation.every": 1,
        "evaluation.prompts": 12,
        "evaluation.samples": 4,
    }
    run = create.start(resolve.resolve("math", changes), str(folder / "root"), "math")
    run_all(run)
    return run


def test_a_run_of_the_papers_objective_is_whole(finished: Run):
    assert check(finished).ok
    assert rows(finished, "select count(*), max(step) from steps") == [(4, 4)]
    assert finished.config["objective"]["name"] == "tba-prime"


def test_problems_of_other_levels_are_left_out_of_training_and_length_is_not_the_only_reason_given(finished: Run):
    kept = [f"train-{n:05d}" for n in range(20) if (n + 2) % 5 != 1]
    assert [prompt.prompt_id for prompt in read_prompts(finished, "train")] == kept
    assert len(read_prompts(finished, "test")) == 20
    assert rows(finished, "select message from events where kind = 'prompts-left-out'") == [
        (
            "4 of 20 rows of split 'train' made no prompt: they have more than 256 tokens (search.max_prompt_tokens), "
            "or the task has a reason of its own",
        )
    ]
    asked = rows(finished, "select distinct prompt_id from trajectories where round = 0 order by 1")
    assert asked == [(prompt_id,) for prompt_id in kept[:4]]  # unshuffled


def test_rewards_are_1_where_the_last_box_has_the_answer_in_whatever_form(finished: Run):
    found = rows(finished, "select response, reward from trajectories")
    boxes = [([None, *BOX.findall(response)][-1], reward) for response, reward in found]
    assert {reward for box, reward in boxes if box in RIGHT} == {1.0}
    assert {reward for box, reward in boxes if box not in RIGHT} == {0.0}
    assert {box for box, _ in boxes} >= {*RIGHT, *WRONG}


def test_each_version_is_scored_by_the_same_rule(finished: Run):
    found = rows(finished, "select version, metric, n, value from evaluations order by all")
    # The first and the last version are scored whatever happens; those between, if the evaluator gets there in time.
    assert [it[:3] for it in found if it[0] in (0, 4)] == [
        (version, *measured) for version in (0, 4) for measured in (("greedy", 12), ("sampled", 48))
    ]
    assert all(0 < value < 1 for _, metric, _, value in found if metric == "sampled")
