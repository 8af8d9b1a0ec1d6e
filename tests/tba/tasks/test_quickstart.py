from itertools import islice
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tba.config import TaskConfig
from tba.errors import ConfigError
from tba.models.supervised import Demonstration, probabilities
from tba.tasks import quickstart
from tba.tasks.quickstart_problems import demonstrations, problems
from tba.tasks.registry import get_task, grade
from tests.support.tba.quickstart_examples import prompts, response


def read(written: str) -> int:
    return int(written[::-1])


def test_prompts_ask_for_sums_and_answers_are_the_sums_all_written_units_first():
    for prompt in prompts("test"):
        left, _, right = prompt.text.rstrip("=").partition("+")
        assert read(left) + read(right) == read(prompt.answer)


def test_train_and_test_share_no_problem_and_are_the_same_in_every_run():
    train, test = prompts("train"), prompts("test")
    assert (len(train), len(test)) == (4096, 1000)
    assert not {p.text for p in train} & {p.text for p in test}
    assert train == prompts("train")


def test_only_the_whole_answer_that_ends_by_itself_is_rewarded():
    task, prompt = get_task("quickstart"), prompts("test")[0]
    assert task.reward(prompt, response(prompt.answer)).value == 1.0
    assert task.reward(prompt, response(prompt.answer, finished=False)).value == 0.0
    for wrong in ("", prompt.answer[:-1], prompt.answer + "0", prompt.answer[::-1] + " "):
        assert task.reward(prompt, response(wrong)).value == grade("quickstart", "", wrong, prompt.answer) == 0.0


def test_half_of_the_demonstrations_carry_one_or_two_wrong_digits_and_none_is_held_out():
    shown = list(islice(demonstrations(0), 4000))
    held_out = {problem.prompt for problem in problems("test")}
    assert not held_out & {prompt for prompt, _ in shown}
    differing = []
    for prompt, answer in shown:
        left, _, right = prompt.rstrip("=").partition("+")
        truth = str(read(left) + read(right))[::-1]
        assert len(answer) == len(truth)
        differing.append(sum(a != b for a, b in zip(answer, truth, strict=True)))
    share = sum(n > 0 for n in differing) / len(differing)
    assert abs(share - 0.5) < 4 * (0.25 / len(differing)) ** 0.5
    assert set(differing) == {0, 1, 2}


def test_demonstrations_follow_from_the_seed():
    first, again, other = (list(islice(demonstrations(seed), 20)) for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize("field", ["train", "test", "template", "rule"])
def test_a_choice_that_quickstart_does_not_have_is_refused_by_name(field: str):
    with pytest.raises(ConfigError, match=rf"task\.{field} must be .*, got 'other'"):
        get_task(TaskConfig(name="quickstart", **{field: "other"}))


@pytest.mark.long
@pytest.mark.timeout(900)
def test_the_base_policy_is_right_less_than_45_times_in_a_hundred_and_knows_more_than_that(tmp_path: Path):
    task, reports = get_task("quickstart"), []
    assert isinstance(task, quickstart.Quickstart)
    task.base_policy(tmp_path, seed=0, report=lambda what, share: reports.append((what, share)))
    assert reports
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    ids = [
        tuple(tokenizer(text).input_ids) for problem in problems("test") for text in (problem.prompt, problem.answer)
    ]
    pairs = [Demonstration(p, (*a, tokenizer.eos_token_id)) for p, a in zip(ids[::2], ids[1::2], strict=True)]
    chances = probabilities(model, pairs)
    assert 0.3 < chances.mean() <= 0.45
    assert (chances > 0.05).float().mean() > 0.9  # only sampled answers can be rewarded


def test_the_recipe_names_the_libraries_and_stays_the_same():
    task = get_task("quickstart")
    assert isinstance(task, quickstart.Quickstart)
    assert task.recipe() == task.recipe() and "torch" in task.recipe()
