"""Our own prompts of instructions: their constraints, and a right answer to every prompt. Tests that check responses
need the library if-verifiable."""

import os
import re
import subprocess
import sys
from itertools import combinations, product
from pathlib import Path
from random import Random
from statistics import fmean

import pytest

from benchmarks.harness.tiny_models import tiny_tokenizer
from tba.interfaces import Measures, TakesOptions
from tba.tasks.instructions import checkers, topics
from tba.tasks.instructions.constraints import KINDS, Constraint, Draw, go_together
from tba.tasks.instructions.own_prompts import held_out_pairs
from tests.support.tba.instructions.answers import FILLER, right_answer, wrong_answer
from tests.support.tba.instructions.examples import BULLETS, COMMAS, MIXTURE, SPLITS, TITLE, make_task, needs_library

# --- constraints ------------------------------------------------------------------------------------------------------


def test_a_prompt_is_a_request_followed_by_its_constraints():
    for split, number in product(SPLITS, range(200)):
        text, constraints = MIXTURE.draw(split, number)
        assert 1 <= len(constraints) <= 3
        assert any(re.match(re.escape(form).replace(r"\{topic\}", "[^.]+"), text) for form in topics.FORMS)
        for constraint in constraints:
            for value in constraint.arguments.values():
                stated = [value] if isinstance(value, str) else value if isinstance(value, list) else []
                assert all(it in text for it in stated if it not in ("at least", "less than"))


def test_prompts_are_the_same_in_every_process():
    code = (
        "from tba.tasks.instructions.constraints import KINDS\n"
        "from tba.tasks.instructions.own_prompts import Mixture\n"
        "mixture = Mixture(0, (1, 2, 3), 40, tuple(KINDS), ())\n"
        "print([mixture.draw(split, number) for split in ('train', 'test') for number in range(100)])"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert said[0] == said[1] == f"{[MIXTURE.draw(split, number) for split in SPLITS for number in range(100)]}\n"


def test_a_prompt_does_not_depend_on_how_many_there_are():
    assert MIXTURE.draw("train", 5) == MIXTURE.draw("train", 5)
    assert MIXTURE.draw("train", 5) != MIXTURE._replace(seed=1).draw("train", 5)
    texts = [MIXTURE.draw("train", number).text for number in range(1000)]
    assert len(set(texts)) == len(texts)


def test_the_splits_share_no_topic_no_word_and_no_combination_of_several_constraints():
    drawn = {split: [MIXTURE.draw(split, number) for number in range(500)] for split in SPLITS}
    for words in (*topics.TOPICS.values(), topics.KEYWORDS, topics.AVOIDED, topics.FIRST_WORDS, topics.LAST_PHRASES):
        train, test = (topics.part(split, words) for split in SPLITS)
        assert not set(train) & set(test) and {*train, *test} == {*words} and len(train) > len(test) > 0
        for mine, others in ((train, "test"), (test, "train")):
            for word in mine:
                quoted = f'"{word}"' if words not in topics.TOPICS.values() else f" {word}."
                assert not any(quoted in text for text, _ in drawn[others]), word
    together = {
        split: {frozenset(it.kind for it in constraints) for _, constraints in prompts if len(constraints) > 1}
        for split, prompts in drawn.items()
    }
    assert len(together["train"]) > 100 and not together["train"] & together["test"]
    pairs = {pair for kinds in together["train"] for pair in combinations(sorted(kinds), 2)}
    assert not pairs & held_out_pairs(KINDS)


def test_kinds_that_contradict_each_other_are_never_together():
    assert all(go_together(one, other) == go_together(other, one) for one, other in product(KINDS, KINDS))
    assert not any(go_together(kind, kind) for kind in KINDS)
    assert not go_together("change_case:english_capital", "change_case:english_lowercase")
    for split, count in product(SPLITS, (1, 2, 3)):
        for kinds in MIXTURE.combinations(split, count):
            assert len(kinds) == count and all(go_together(*pair) for pair in combinations(kinds, 2))


def test_every_kind_occurs_in_both_splits():
    for split in SPLITS:
        assert {it.kind for number in range(300) for it in MIXTURE.draw(split, number).constraints} == {*KINDS}


def test_forbidden_words_are_in_nothing_that_another_constraint_asks_for():
    asked = " ".join((*topics.KEYWORDS, *topics.FIRST_WORDS, *topics.LAST_PHRASES, *FILLER)).lower()
    assert not {*re.findall(r"\w+", asked)} & {*topics.AVOIDED}


def test_the_kinds_and_numbers_of_constraints_can_be_chosen():
    mixture = MIXTURE._replace(kinds=(BULLETS, COMMAS, TITLE), counts=(1, 1, 2))
    drawn = [mixture.draw("train", number).constraints for number in range(300)]
    assert {it.kind for constraints in drawn for it in constraints} == {BULLETS, COMMAS, TITLE}
    assert 0.55 < fmean(len(constraints) == 1 for constraints in drawn) < 0.78


def test_held_out_kinds_are_in_no_training_prompt_and_in_every_evaluation_prompt():
    mixture = MIXTURE._replace(held_out_kinds=(BULLETS, TITLE))
    kinds = {
        split: [{it.kind for it in mixture.draw(split, number).constraints} for number in range(200)]
        for split in SPLITS
    }
    assert not any(it & {BULLETS, TITLE} for it in kinds["train"])
    assert all(it & {BULLETS, TITLE} for it in kinds["test"])


@pytest.mark.parametrize("words", [20, 200])
def test_lengths_follow_the_option(words: int):
    numbers = [
        KINDS["length_constraints:number_words"](Draw(Random(i), "train", "Write.", words))[0]["num_words"]
        for i in range(200)
    ]
    assert min(numbers) >= words // 2 and max(numbers) <= words and len(set(numbers)) > 5


# --- the prompts of the task ------------------------------------------------------------------------------------------


@needs_library
def test_the_number_of_prompts_can_be_chosen_and_prompts_that_are_too_long_are_left_out():
    task, tokenizer = make_task(train_prompts=30, test_prompts=9), tiny_tokenizer()
    assert isinstance(task, TakesOptions) and isinstance(task, Measures)
    train, test = (task.prompts(split, [], tokenizer, max_tokens=10_000) for split in SPLITS)
    assert (len(train), len(test)) == (30, 9)
    assert len({prompt.prompt_id for prompt in (*train, *test)}) == 39
    longest = max(len(prompt.tokens) for prompt in train)
    short = task.prompts("train", [], tokenizer, max_tokens=longest - 1)
    assert 0 < len(short) < 30 and {prompt.prompt_id for prompt in short} < {prompt.prompt_id for prompt in train}


@needs_library
def test_a_prompt_follows_the_chat_template_if_there_is_one():
    tokenizer = tiny_tokenizer()
    (prompt,) = make_task(test_prompts=1).prompts("test", [], tokenizer, max_tokens=10_000)
    assert prompt.text == f"{MIXTURE.draw('test', 0).text}\n\n"
    tokenizer.chat_template = "{% for message in messages %}# {{ message['content'] }}?{% endfor %}"
    (prompt,) = make_task(test_prompts=1).prompts("test", [], tokenizer, max_tokens=10_000)
    assert prompt.text == f"# {MIXTURE.draw('test', 0).text}?"
    assert prompt.tokens == tuple(tokenizer(prompt.text, add_special_tokens=False).input_ids)
    (prompt,) = make_task(test_prompts=1, template="plain").prompts("test", [], tokenizer, max_tokens=10_000)
    assert prompt.text == f"{MIXTURE.draw('test', 0).text}\n\n"


# --- every prompt has a right answer ----------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize("kind", KINDS)
def test_a_right_answer_keeps_a_constraint_and_a_wrong_one_does_not(kind: str):
    for seed in range(40):
        draw = Draw(Random(seed), SPLITS[seed % 2], "Write a short poem about bees.", 40)
        constraint = Constraint(kind, KINDS[kind](draw)[0])
        assert checkers.holds(constraint, right_answer([constraint])), constraint
        assert not checkers.holds(constraint, wrong_answer(constraint)), constraint
        assert not checkers.holds(constraint, " \n")


@needs_library
@pytest.mark.slow
@pytest.mark.parametrize("split", SPLITS)
def test_no_combination_of_constraints_contradicts_itself(split: str):
    """A short response keeps all constraints, whatever their kinds and arguments are."""
    for count in (2, 3):
        for kinds in MIXTURE.combinations(split, count):
            draw = Draw(Random(" ".join(kinds)), split, "Write a short poem about bees.", 40)
            constraints = [Constraint(kind, KINDS[kind](draw)[0]) for kind in kinds]
            answer = right_answer(constraints)
            assert [it for it in constraints if not checkers.holds(it, answer)] == [], answer
            assert len(answer.split()) <= 64


@needs_library
def test_our_kinds_keep_the_conflicts_of_ifeval():
    from if_verifiable.ifeval.instructions_registry import INSTRUCTION_CONFLICTS, INSTRUCTION_DICT, conflict_make

    assert {*KINDS} < {*INSTRUCTION_DICT}
    conflicts = conflict_make({kind: {*others} for kind, others in INSTRUCTION_CONFLICTS.items()})
    assert [
        (one, other) for one, other in product(KINDS, KINDS) if other in conflicts[one] and go_together(one, other)
    ] == []
