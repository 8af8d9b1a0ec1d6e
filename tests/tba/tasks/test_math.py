import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from benchmarks.harness.tiny_models import EOS, EOS_ID, tiny_tokenizer
from tba.config import TaskConfig
from tba.errors import ConfigError, DataError
from tba.presets import preset
from tba.tasks.math500 import listed
from tba.tasks.registry import get_task, grade
from tba.types import Response, Version
from tests.support.original_data import original_data

ROWS = [
    {"problem": "What is two and two?", "answer": "4", "level": 1, "subject": "Prealgebra", "unique_id": "x"},
    {"problem": "What, in words that are many, is half of one?", "solution": r"It is $\boxed{\frac{1}{2}}$."},
    {"problem": "Three less two?", "answer": "1", "level": "Level 2", "solution": "no box"},
]
REQUEST = "Please reason step by step, and put your final answer within \\boxed{}."


def held_out() -> list[dict[str, Any]]:
    return [json.loads(line) for line in original_data("math500/test.jsonl").read_text().splitlines()]


def tokenizer(template: str | None = None) -> Any:
    """Return a tokenizer that begins every text with a special token, unless it is disabled."""
    it = tiny_tokenizer()
    it.backend_tokenizer.post_processor = TemplateProcessing(single=f"{EOS} $A", special_tokens=[(EOS, EOS_ID)])
    it.chat_template = template
    return it


def response(text: str) -> Response:
    return Response(
        tokens=(1,), logps=(-1.0,), text=text, finished=True, temperature=1.0, top_p=1.0, seed=0,
        version_start=Version(0, 1), version_end=Version(0, 1), generate_seconds=0.0,
    )  # fmt: skip


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_by_default_a_problem_is_a_message_in_the_models_own_template():
    chat = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<me>{% endif %}"
    )
    it = tokenizer(chat)
    (prompt,) = get_task("math").prompts("train", ROWS[:1], it, max_tokens=1000)
    assert prompt.text == f"<user>What is two and two?\n\n{REQUEST}<me>"
    assert prompt.tokens == tuple(it(prompt.text, add_special_tokens=False).input_ids)  # the template has them


@pytest.mark.parametrize(("template", "chat"), [("plain", "a chat"), ("plain", None), ("qwen-boxed", None)])
def test_plain_text_where_it_is_asked_for_or_the_model_has_no_template(template: str, chat: str | None):
    it = tokenizer(chat)
    task = get_task(TaskConfig(name="math", template=template))
    (prompt,) = task.prompts("train", ROWS[:1], it, max_tokens=1000)
    assert prompt.text == f"Problem:\nWhat is two and two?\n\n{REQUEST}\n\nSolution:\n"
    assert prompt.tokens == tuple(it(prompt.text).input_ids)
    assert prompt.tokens[0] == EOS_ID


def test_an_answer_is_a_field_or_the_last_box_of_the_solution_and_what_is_known_of_a_problem_is_kept():
    prompts = get_task("math").prompts("train", ROWS, tokenizer(), max_tokens=1000)
    assert [(it.prompt_id, it.answer, it.metadata) for it in prompts] == [
        ("train-00000", "4", {"level": 1, "subject": "Prealgebra"}),
        ("train-00001", r"\frac{1}{2}", {}),
        ("train-00002", "1", {"level": "Level 2"}),
    ]


def test_prompts_that_are_too_long_are_left_out_and_the_others_keep_their_names():
    whole = get_task("math").prompts("test", ROWS, tokenizer(), max_tokens=10_000)
    some = get_task("math").prompts("test", ROWS, tokenizer(), max_tokens=len(whole[0].tokens))
    assert some == [whole[0], whole[2]]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"answer": "1"}, "train row 1: field 'problem' must be text, got None"),
        ({"problem": " ", "answer": "1"}, "train row 1: field 'problem' must be text"),
        ({"problem": "1?", "answer": 7}, "train row 1: field 'answer' must be text, got 7"),
        ({"problem": "1?"}, "train row 1: field 'solution' must be text, got None"),
        ({"problem": "1?", "answer": None, "solution": "It is 1."}, "train row 1: no field 'answer', and no .*boxed"),
        ({"problem": "1?", "solution": r"It is \boxed{1"}, "train row 1: no field 'answer', and no .*boxed"),
    ],
)
def test_a_malformed_row_is_named_with_its_field(row: dict[str, object], says: str):
    with pytest.raises(DataError, match=says):
        get_task("math").prompts("train", [ROWS[0], row], tokenizer(), max_tokens=1000)


# --- what is never trained on -----------------------------------------------------------------------------------------


def test_the_fingerprints_are_those_of_math_500_and_no_copy_of_it():
    with original_data("math500/test.jsonl").open() as lines:
        made = listed(lines)
    shipped = Path(listed.__code__.co_filename).with_name("fingerprints.txt").read_text()
    assert shipped == made
    assert len(set(shipped.split())) == 500
    whole = hashlib.sha256("".join(held_out()[7]["problem"].split()).encode()).hexdigest()
    assert shipped.split()[7] == whole[:8]


def test_problems_of_math_500_are_left_out_of_training_and_the_others_keep_their_names():
    first, second = held_out()[:2]
    respaced = {**second, "problem": "  " + second["problem"].replace(" ", "\n ")}
    rows = [ROWS[0], first, ROWS[1], respaced, ROWS[2]]
    prompts = get_task("math").prompts("train", rows, tokenizer(), max_tokens=10_000)
    assert [it.prompt_id for it in prompts] == ["train-00000", "train-00002", "train-00004"]
    assert [it.answer for it in prompts] == ["4", r"\frac{1}{2}", "1"]


def test_math_500_is_evaluated_whole():
    assert len(get_task("math").prompts("test", held_out(), tokenizer(), max_tokens=100_000)) == 500


def test_a_training_set_that_is_math_500_is_refused_by_its_name():
    rows = held_out()
    random.Random(0).shuffle(rows)
    task = get_task(TaskConfig(name="math", train="s3://bucket/mine.jsonl"))
    for some in (rows, rows[:3], [*rows[:300], *ROWS]):
        with pytest.raises(DataError, match=r"task\.train must not be MATH-500.* rows of s3://bucket/mine\.jsonl are"):
            task.prompts("train", some, tokenizer(), max_tokens=10_000)


# --- settings and reward ----------------------------------------------------------------------------------------------


def test_an_unknown_rule_or_template_is_refused_by_name():
    for field in ("rule", "template"):
        with pytest.raises(ConfigError, match=rf"task\.{field} must be one of .*, got 'best'"):
            get_task(TaskConfig(name="math", **{field: "best"}))


def test_the_papers_run_names_the_task_and_its_data_are_on_the_hub():
    task = get_task(preset("math").task)
    assert task.name == "math"
    train, test = task.source("train"), task.source("test")
    assert train.startswith("hf://datasets/") and test.startswith("hf://datasets/") and train != test


@pytest.mark.parametrize(
    ("rule", "text", "value"),
    [
        ("", r"$\boxed{0.5}$", 1.0),
        ("", "0.5", 0.0),
        ("minerva", "0.5", 1.0),
        ("prm800k", r"$\boxed{\frac{2}{4}}$", 0.0),
        ("boxed", r"$\boxed{1/2}$", 1.0),
        ("boxed", r"$\boxed{1/2}$</think>", 0.0),
    ],
)
def test_the_reward_is_that_of_the_chosen_rule(rule: str, text: str, value: float):
    task = get_task(TaskConfig(name="math", rule=rule))
    prompt = task.prompts("train", ROWS, tokenizer(), max_tokens=1000)[1]
    assert task.reward(prompt, response(text)).value == grade("math", rule, text, prompt.answer) == value


def levels(*rows: dict[str, object]) -> list[str]:
    task = get_task(TaskConfig(name="math", options={"levels": [1, 2]}))
    return [prompt.prompt_id for prompt in task.prompts("train", rows, tokenizer(), max_tokens=1000)]


def test_training_can_be_kept_to_some_levels_of_difficulty():
    others = [{**ROWS[0], "level": level} for level in (3, "Level 5", "Level ?")]
    assert levels(ROWS[0], *others, ROWS[2]) == ["train-00000", "train-00004"]
    with pytest.raises(DataError, match=r"train row 1: task.options.levels needs field 'level'"):
        levels(ROWS[0], {"problem": "How many?", "answer": "7"})
    task = get_task(TaskConfig(name="math", options={"levels": [1]}))
    assert len(task.prompts("test", [ROWS[0], *others], tokenizer(), max_tokens=1000)) == 4
