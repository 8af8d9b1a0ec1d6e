import json
from collections.abc import Sequence

import pytest

from benchmarks.harness.tiny_models import tiny_tokenizer
from tba.config import TaskConfig
from tba.errors import ConfigError, DataError
from tba.tasks.registry import get_task, grade, rules
from tests.support.original_data import original_data

ROWS = [
    {"question": "Two and two?", "answer": "Count.\n#### 4"},
    {"question": "A much longer question, of how many words?", "answer": "Eight.\n#### 8"},
    {"question": "One more than two?", "answer": "#### 3"},
]
RULES = ("last-number", "after-hashes", "strict-hashes")


def rows(split: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (original_data("gsm8k") / f"{split}.jsonl").read_text().splitlines()]


def gold(row: dict[str, str]) -> str:
    return row["answer"].rpartition("####")[2].strip()


def test_the_rules_have_names_and_the_papers_comes_first():
    assert tuple(rules("gsm8k")) == RULES
    assert grade("gsm8k", "", "so 18", "18") == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        # response, gold, right under last-number, after-hashes, strict-hashes
        ("1,234", "1234", (1, 0, 0)),
        ("It is -5", "-5", (1, 0, 0)),
        ("5-3", "-3", (1, 0, 0)),
        ("1.5e3", "3", (1, 0, 0)),
        ("12/4", "4", (1, 0, 0)),
        ("The answer is 26.", "26", (1, 0, 0)),
        ("no number at all", "0", (0, 0, 0)),
        ("", "7", (0, 0, 0)),
        ("#### 18", "18", (1, 1, 1)),
        ("####18", "18", (1, 1, 0)),
        ("#### 18.00", "18", (1, 0, 0)),
        ("#### $18", "18", (1, 0, 0)),
        ("#### 3 so #### 18", "18", (1, 1, 0)),
        ("#### 18 so #### 3", "18", (0, 0, 1)),
        ("#### 1,234", "1234", (1, 1, 1)),
        ("#### 1,234", "1,234", (1, 0, 1)),
        ("#### 1234", "1,234", (1, 0, 1)),
        ("#### 18 dollars in 2024", "18", (0, 0, 1)),
        ("17", "18", (0, 0, 0)),
    ],
)
def test_each_rule_reads_the_answer_in_its_own_way(response: str, answer: str, right: Sequence[int]):
    assert tuple(grade("gsm8k", rule, response, answer) for rule in RULES) == right


def test_an_unknown_rule_or_template_is_refused_by_name():
    for field in ("rule", "template"):
        with pytest.raises(ConfigError, match=rf"task\.{field} must be one of .*, got 'best'"):
            get_task(TaskConfig(name="gsm8k", **{field: "best"}))


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_worked_solution_is_right_under_the_papers_rule(split: str):
    wrong = [row["question"] for row in rows(split) if not grade("gsm8k", "last-number", row["answer"], gold(row))]
    assert wrong == []


def test_commas_in_golds_cost_the_rule_after_hashes_its_ceiling_and_the_others_nothing():
    test = rows("test")
    assert (len(rows("train")), len(test)) == (7473, 1319)
    assert (sum("," in gold(row) for row in rows("train")), sum("," in gold(row) for row in test)) == (79, 14)
    right = {rule: sum(grade("gsm8k", rule, row["answer"], gold(row)) for row in test) for rule in RULES}
    assert right == {"last-number": 1319, "after-hashes": 1319 - 14, "strict-hashes": 1319}


@pytest.mark.parametrize(
    ("template", "begin", "end"),
    [
        ("tba", "[MATH TASK] Problem:\n", "\n\nSolution:\n"),
        ("vineppo", "[MATH_TASK] Problem:\n", "\n\nSolution:"),
    ],
)
def test_prompts_are_worded_as_their_template_says(template: str, begin: str, end: str):
    task = get_task(TaskConfig(name="gsm8k", template=template))
    (prompt,) = task.prompts("test", ROWS[:1], tiny_tokenizer(), max_tokens=1000)
    assert prompt.text == f"{begin}Two and two?{end}"
    assert (prompt.prompt_id, prompt.answer) == ("test-00000", "4")


def test_prompts_that_are_too_long_are_left_out_and_the_others_keep_their_names():
    task, tokenizer = get_task("gsm8k"), tiny_tokenizer()
    whole = task.prompts("test", ROWS, tokenizer, max_tokens=10_000)
    assert [prompt.prompt_id for prompt in whole] == ["test-00000", "test-00001", "test-00002"]
    some = task.prompts("test", ROWS, tokenizer, max_tokens=len(whole[2].tokens))
    assert some == [whole[0], whole[2]]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"answer": "#### 1"}, "train row 1: field 'question' must be text"),
        ({"question": "1?", "answer": 7}, "train row 1: field 'answer' must be text"),
        ({"question": "1?", "answer": "one"}, "train row 1: field 'answer' does not end in"),
    ],
)
def test_a_malformed_row_is_named_with_its_field(row: dict[str, object], says: str):
    good = {"question": "1?", "answer": "#### 1"}
    with pytest.raises(DataError, match=says):
        get_task("gsm8k").prompts("train", [good, row], tiny_tokenizer(), max_tokens=100)
