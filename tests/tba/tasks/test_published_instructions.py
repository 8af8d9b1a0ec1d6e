"""Published prompts with constraints: the rows that become prompts, and those that are refused. Tests need the library
if-verifiable."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from benchmarks.harness.tiny_models import tiny_tokenizer
from tba.errors import ConfigError, DataError
from tba.tasks.instructions import checkers
from tba.tasks.instructions.constraints import Constraint
from tba.types import Prompt
from tests.support.tba.instructions.examples import BULLETS, COMMAS, make_task, needs_library, respond

ROW = {"key": 7, "prompt": "Write about rain.", "instruction_id_list": [COMMAS], "kwargs": [{}]}


def published(rows: Sequence[Any], split: str = "test", **options: Any) -> list[Prompt]:
    return make_task(**{split: "rows.jsonl"}, **options).prompts(split, rows, tiny_tokenizer(), max_tokens=1000)


@needs_library
def test_rows_become_prompts_with_their_constraints():
    kwargs = [{"N": 3.0, "keyword": None, "percentage": None}, {"N": None}]
    rows = [ROW, {**ROW, "key": "8", "instruction_id_list": ["count:numbers", COMMAS], "kwargs": kwargs}]
    first, second = published(rows)
    assert (first.prompt_id, second.prompt_id) == ("test-00000", "test-00001")
    assert first.text == "Write about rain.\n\n" and first.metadata["key"] == 7
    assert second.metadata == {
        "key": "8", "instruction_id_list": ["count:numbers", COMMAS], "kwargs": [{"N": 3}, {}]
    }  # fmt: skip
    stored = Prompt(**{**vars_of(second), "metadata": json.loads(json.dumps(second.metadata))})
    assert make_task().reward(stored, respond("1 2 3")).value == 1
    assert make_task().reward(stored, respond("1 2")).value == 0


def vars_of(prompt: Prompt) -> dict[str, Any]:
    return {name: getattr(prompt, name) for name in ("prompt_id", "text", "tokens", "answer")}


@needs_library
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"prompt": " "}, "test row 1: field 'prompt' must be text"),
        ({"instruction_id_list": []}, "test row 1: field 'instruction_id_list' must be a list of kinds, got []"),
        ({"instruction_id_list": COMMAS}, "test row 1: field 'instruction_id_list' must be a list"),
        ({"kwargs": None}, "test row 1: field 'kwargs' must be a list"),
        ({"kwargs": [{}, {}]}, "test row 1: field 'kwargs' must be a list with the arguments of each of the 1 kinds"),
        ({"instruction_id_list": ["no:kind"]}, "test row 1: unknown kind of constraint 'no:kind'"),
        ({"instruction_id_list": [3]}, "test row 1: unknown kind of constraint 3"),
        ({"instruction_id_list": [BULLETS]}, f"test row 1: '{BULLETS}' needs the argument 'num_bullets'"),
        ({"kwargs": [{"colour": "red"}]}, f"test row 1: the arguments of '{COMMAS}' are refused: TypeError"),
        (
            {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["c++("]}]},
            "test row 1: the arguments of 'keywords:existence' are refused: error: ",
        ),
        (
            {
                "instruction_id_list": ["length_constraints:number_words"],
                "kwargs": [{"num_words": 9, "relation": "about"}],
            },
            "are refused: ValueError",
        ),
    ],
)
def test_a_malformed_row_is_named_with_its_fault(change: dict[str, Any], says: str):
    with pytest.raises(DataError) as refused:
        published([ROW, {**ROW, **change}], uncheckable="leave-out")
    assert says in str(refused.value)


RANDOM = {
    **ROW,
    "instruction_id_list": ["keywords:letter_frequency"],
    "kwargs": [{"letter": "#", "let_frequency": 4, "let_relation": "at least"}],
}
"""A row of IFEval, whose checker counts a random letter instead of "#"."""


@needs_library
def test_rows_that_cannot_be_checked_are_refused_or_left_out():
    with pytest.raises(DataError) as refused:
        published([ROW, RANDOM, RANDOM])
    assert "test row 1: the checker of 'keywords:letter_frequency' does not take letter='#'" in str(refused.value)
    assert "task.options.uncheckable=leave-out leaves out the 2 of 3 rows" in str(refused.value)
    assert [it.prompt_id for it in published([RANDOM, ROW, RANDOM], uncheckable="leave-out")] == ["test-00001"]


@needs_library
@pytest.mark.parametrize("kind", checkers.NEEDED_DATA)
def test_a_checker_that_needs_data_of_nltk_is_not_used_without(kind: str, monkeypatch: pytest.MonkeyPatch):
    import nltk

    monkeypatch.setattr(nltk.data, "path", [])
    arguments = {
        "length_constraints:number_sentences": {"num_sentences": 2, "relation": "at least"},
        "change_case:capital_word_frequency": {"capital_frequency": 2, "capital_relation": "at least"},
        "words:keywords_specific_position": {"keyword": "rain", "n": 1, "m": 2},
        "words:words_position": {"keyword": "rain"},
        "ratio:stop_words": {"percentage": 50},
    }
    row = {**ROW, "instruction_id_list": [kind], "kwargs": [arguments.get(kind, {})]}
    with pytest.raises(DataError, match=f"test row 0: '{kind}' needs data of NLTK, .*: python -m nltk.downloader "):
        published([row])
    with pytest.raises(ConfigError, match=r"a response cannot be checked on this machine: .*-m nltk\.downloader "):
        checkers.holds(Constraint(kind, row["kwargs"][0]), "It rains.")


@needs_library
def test_ifbench_is_for_evaluation_only():
    row = {**ROW, "instruction_id_list": ["format:no_whitespace"]}
    assert len(published([row])) == 1
    with pytest.raises(DataError, match=r"train row 1: task\.train must not have prompts of IFBench"):
        published([ROW, row], split="train")
    assert len(published([ROW], split="train")) == 1


@needs_library
def test_published_prompts_of_one_split_go_with_our_own_of_the_other():
    task = make_task(test="rows.jsonl", train_prompts=5)
    assert len(task.prompts("train", [], tiny_tokenizer(), max_tokens=1000)) == 5
    assert len(task.prompts("test", [ROW], tiny_tokenizer(), max_tokens=1000)) == 1
    assert task.prompts("test", [], tiny_tokenizer(), max_tokens=1000) == []
