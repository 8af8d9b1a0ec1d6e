"""Problems of the library reasoning_gym, with whole roles on real storage."""

from contextlib import closing

import pytest
import torch

from benchmarks.harness.tiny_models import tiny_llama, tiny_tokenizer
from flows.planning import create
from storage.log.prompts import read_prompts
from storage.maintenance.check import check
from storage.runs.run import Run
from storage.weights.evaluations import Evaluations
from tba.config import parse_known
from tba.models.policy import Policy
from tba.tasks.reasoning_gym.task import ReasoningGym
from tba.tasks.registry import get_task
from tests.support.flows.live_roles import rows, run_all, settings
from tests.support.laptop import needs
from tests.support.tba.reasoning_gym_examples import ONE_DIGIT, response_of

pytestmark = needs("reasoning_gym")
CHARACTERS = "0123456789 +-=x"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run whose policy writes digits at random, and is sometimes right."""
    folder = tmp_path_factory.mktemp("policy") / "tiny"
    model = tiny_llama(characters=CHARACTERS)
    Policy(model, tiny_tokenizer(CHARACTERS), torch.device("cpu")).snapshot().save(folder)
    mixture = [
        {"name": "chain_sum", "weight": 3, "settings": ONE_DIGIT},
        {"name": "gcd", "settings": {"min_value": 1, "max_value": 9}},
    ]
    changes = {
        "task.name": "reasoning-gym", "task.rule": "last-number", "training.steps": 4,
        "task.options": {"datasets": mixture, "train_size": 40, "test_size": 8},
        "search.max_prompt_tokens": 200, "search.max_response_tokens": 6,
    }  # fmt: skip
    run = create.start(settings(folder, **changes), str(tmp_path_factory.mktemp("root")), "sums")
    run_all(run)
    return run


def test_a_run_ends_with_every_step_and_a_score_of_each_data_set(finished: Run):
    assert rows(finished, "select count(*), max(step) from steps") == [(4, 4)]
    assert {version.number for version in Evaluations(finished).done()} >= {0, 2}
    metrics = {metric for (metric,) in rows(finished, "select distinct metric from evaluations")}
    assert metrics >= {f"{kind}{of}" for kind in ("greedy", "sampled") for of in ("", "_chain_sum", "_gcd")}
    assert check(finished).ok


def test_train_and_test_are_apart_in_storage(finished: Run):
    train, test = read_prompts(finished, "train"), read_prompts(finished, "test")
    assert (len(train), len(test)) == (40, 8)
    assert not {prompt.text for prompt in train} & {prompt.text for prompt in test}


def test_rewards_follow_from_the_answers_that_were_read(finished: Run):
    query = """
        select answer, response, reward, reward_parts['by_last_number'] from trajectories join prompts using (prompt_id)
    """
    trajectories = rows(finished, query)
    assert {read for *_, read in trajectories} == {0.0, 1.0}
    for answer, response, reward, read in trajectories:
        assert read == any(character.isdigit() for character in response)
        assert (reward > 0) <= (answer in response)
        assert (response.strip() == answer) <= (reward == 1.0)


def test_the_right_answers_of_stored_prompts_earn_everything(finished: Run):
    task = get_task(parse_known(finished.config).task)
    assert isinstance(task, ReasoningGym)
    with closing(task.library):
        prompts = [*read_prompts(finished, "train"), *read_prompts(finished, "test")]
        assert [task.reward(prompt, response_of(prompt.answer)).value for prompt in prompts] == [1.0] * 48
        assert task.reward(prompts[0], response_of("no number")).value == 0


def test_the_metadata_of_prompts_can_be_queried(finished: Run):
    query = """
        select metadata->>'dataset' as dataset, metadata->'entry'->'metadata'->>'num_digits' as digits, count(*)
        from prompts where split = 'train' group by all order by all
    """
    assert rows(finished, query) == [("chain_sum", "1", 30), ("gcd", None, 10)]
