"""The prompts of a run: which ones its trainer stores, and which ones it refuses before anything is searched."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import fakes
from benchmarks.harness.tiny_models import tiny_folder
from flows.planning import create
from flows.roles import prompt_intake
from storage.log.prompts import read_prompts
from storage.runs.events import Events
from storage.runs.run import Run
from tba.config import parse
from tba.errors import ConfigError, DataError
from tba.models.policy import Policy
from tba.types import Prompt
from tests.support.flows.live_roles import ended_at_once, rows, settings
from tests.support.flows.prompt_examples import gsm8k, store_prompts, word_problems


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("policy") / "tiny")


def test_a_limit_that_leaves_no_prompt_ends_the_run_before_anything_is_searched(policy, tmp_path):
    error = ended_at_once(settings(policy, **{"search.max_prompt_tokens": 2}), tmp_path)
    assert isinstance(error, DataError)
    assert str(error) == (
        "task 'quickstart' makes no prompt of split 'train' with at most 2 tokens (search.max_prompt_tokens)"
    )


class Careless(fakes.Task):
    """A task that makes three prompts of one row, and adds the prompts that it is given."""

    def __init__(self, data: Path, *others: Prompt):
        self.data, self.others = data, others

    def source(self, split: str) -> str:
        return str(self.data)

    def prompts(
        self, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int
    ) -> list[Prompt]:
        return [*super().prompts(split, rows, tokenizer, max_tokens=max_tokens), *self.others]


def store_careless(policy: Path, folder: Path, *others: Prompt) -> Run:
    run = create.start(settings(policy), str(folder), "careless")
    task = Careless(word_problems(folder, "train", 0), *others)
    prompt_intake.store_prompts(run, parse(run.config), task, None, Events(run, "trainer", 1))
    return run


@pytest.mark.parametrize("tokens", [0, 17])
def test_a_prompt_that_no_policy_can_read_is_refused_before_anything_is_searched(policy, tmp_path, tokens):
    says = rf"task 'fake': prompt 'odd' must have 1 to 16 tokens \(search.max_prompt_tokens\), got {tokens}"
    with pytest.raises(DataError, match=says):
        store_careless(policy, tmp_path, Prompt(prompt_id="odd", text="", tokens=(2,) * tokens))


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"answer": 7}, "prompt 'odd': answer must be text, got 7"),
        ({"text": None}, "prompt 'odd': text must be text, got None"),
        ({"prompt_id": 3}, "prompt 3: prompt_id must be text, got 3"),
        ({"tokens": ([2, 3],)}, "prompt 'odd': tokens must be whole numbers, got [2, 3]"),
        ({"metadata": {"seen": {1}}}, "prompt 'odd': metadata must be JSON: Object of type set"),
        ({"metadata": {"share": float("nan")}}, "prompt 'odd': metadata must be JSON: Out of range float"),
        (None, "a prompt must be a tba.types.Prompt, got None"),
    ],
)
def test_a_prompt_that_cannot_be_stored_is_refused_by_its_field(policy, tmp_path, odd, says):
    prompt: Any = odd and Prompt(**{"prompt_id": "odd", "text": "", "tokens": (2,), **odd})
    with pytest.raises(DataError) as refused:
        store_careless(policy, tmp_path, prompt)
    assert str(refused.value).startswith(f"task 'fake': {says}")


def test_an_id_that_is_in_both_splits_is_refused(policy, tmp_path):
    says = "task 'fake': prompt_id 'odd' is in both splits, train and test"
    with pytest.raises(DataError, match=says):
        store_careless(policy, tmp_path, Prompt(prompt_id="odd", text="", tokens=(2,)))


def test_what_the_tasks_own_code_raises_names_the_method(policy, tmp_path):
    def fail(split: str) -> str:
        raise KeyError(split)

    run = create.start(settings(policy), str(tmp_path), "careless")
    for method, what in (("source", "KeyError: 'train'"), ("prompts", "TypeError: .*got an unexpected keyword")):
        task: Any = fakes.Task()
        setattr(task, method, fail)
        with pytest.raises(DataError, match=f"task 'fake': {method} raised {what}"):
            prompt_intake.store_prompts(run, parse(run.config), task, None, Events(run, "trainer", 1))


def test_a_row_may_make_several_prompts_and_nothing_is_said_to_be_left_out(policy, tmp_path):
    run = store_careless(policy, tmp_path)
    assert len(read_prompts(run, "train")) == 3
    assert rows(run, "select count(*) from events where kind = 'prompts-left-out'") == [(0,)]


def test_prompts_that_the_earlier_run_asked_in_other_words_are_not_taken_for_the_same(policy, tmp_path):
    train, test = (word_problems(tmp_path, split, 20) for split in ("train", "test"))
    earlier = create.start(gsm8k(policy, train, test), str(tmp_path), "earlier")
    tokenizer = Policy.load(policy, device="cpu").tokenizer
    store_prompts(earlier, tokenizer)
    choosing = {"search.prompts_from": earlier.url, "search.prompts_where": "tries = 0"}
    mended = [json.loads(line) for line in train.read_text().splitlines()]
    mended[3]["question"] = "Who has more?"
    train.write_text("\n".join(map(json.dumps, [*mended, {"question": "How many?", "answer": "So.\n#### 1"}])))
    run = create.start(gsm8k(policy, train, test).replace(choosing), str(tmp_path), "mended")
    store_prompts(run, tokenizer)
    assert [prompt.prompt_id for prompt in read_prompts(run, "train")] == [
        f"train-{n:05d}" for n in range(20) if n != 3
    ]
    said = f"19 of 21 here; 2 are left out that {earlier.url} does not have, by id and text"
    [(message,)] = rows(run, "select message from events where kind = 'prompts-chosen'")
    assert message.endswith(said)
    other = gsm8k(policy, train, test).replace({**choosing, "task.template": "tba"})
    with pytest.raises(
        ConfigError, match=r"0 of 21 here; 21 are left out .*; a round asks 8 \(search.prompts_per_round"
    ):
        store_prompts(create.start(other, str(tmp_path), "other"), tokenizer)
