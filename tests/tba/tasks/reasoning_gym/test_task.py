"""Problems of the real library, in its own process. Rules, and what is told without the library, need no library."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tba.config import TaskConfig, parse_options
from tba.errors import ConfigError
from tba.interfaces import Measures
from tba.tasks.reasoning_gym.entries import decode, encode
from tba.tasks.reasoning_gym.library import Library
from tba.tasks.reasoning_gym.splits import DataSet, Options
from tba.tasks.reasoning_gym.task import ReasoningGym
from tba.tasks.registry import grade, rules
from tests.support.laptop import needs
from tests.support.tba.reasoning_gym_examples import TEMPLATE, make_task, prompts_of, response_of

needs_library = needs("reasoning_gym")
NO_WAY = {"by_tags": 0, "by_boxed": 0, "by_last_number": 0, "by_whole": 0, "unscored": 0}
RULES = ("auto", "tags", "boxed", "last-number", "last-line", "whole")


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    with closing(Library(seconds=0.5)) as library:
        yield library


@pytest.fixture(scope="module")
def sums(library: Library) -> ReasoningGym:
    return make_task(library=library)


# --- rules ------------------------------------------------------------------------------------------------------------


def test_the_first_rule_is_the_default():
    assert tuple(rules("reasoning-gym")) == RULES
    assert grade("reasoning-gym", "", " 42 ", "42") == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        # response, gold, right under auto, tags, boxed, last-number, last-line, whole
        ("42", "42", (1, 0, 0, 1, 1, 1)),
        (" 42\n", "42", (1, 0, 0, 1, 1, 1)),
        ("42.0", "42", (1, 0, 0, 1, 1, 1)),
        ("1,042", "1042", (1, 0, 0, 1, 1, 1)),
        ("17 + 25 = 42.", "42", (1, 0, 0, 1, 0, 0)),
        ("17 and 25 make\n42", "42", (1, 0, 0, 1, 1, 0)),
        ("It is 1.5e3!", "1500", (1, 0, 0, 1, 0, 0)),
        ("No number.", "42", (0, 0, 0, 0, 0, 0)),
        ("3 or 4, so yes", "yes", (0, 0, 0, 0, 0, 0)),
        ("infinity", "Infinity", (0, 0, 0, 0, 0, 0)),
        ("<answer>42</answer> is 6 times 7", "42", (1, 1, 0, 0, 0, 0)),
        ("<answer>1</answer><answer>\n42\n</answer>", "42", (1, 1, 0, 1, 0, 0)),
        ("<answer>42", "42", (1, 0, 0, 1, 0, 0)),
        (r"So \boxed{42}.", "42", (1, 0, 1, 1, 0, 0)),
        (r"<answer>41</answer> \boxed{42}", "42", (0, 0, 1, 1, 0, 0)),
        ("<think>It is 41.</think>42", "42", (1, 0, 0, 1, 1, 1)),
        ("<think><answer>41</answer></think>", "41", (0, 0, 0, 0, 0, 0)),
        ("47-5", "5", (1, 0, 0, 1, 0, 0)),
        ("2 - 7 = -5", "-5", (1, 0, 0, 1, 0, 0)),
        ("yes", "yes", (1, 0, 0, 0, 1, 1)),
        ("Yes", "yes", (0, 0, 0, 0, 0, 0)),
        ("", "42", (0, 0, 0, 0, 0, 0)),
        ("", "", (0, 0, 0, 0, 0, 0)),
    ],
)
def test_each_rule_reads_the_answer_in_its_own_way(response: str, answer: str, right: Sequence[int]):
    assert tuple(grade("reasoning-gym", rule, response, answer) for rule in RULES) == right


@pytest.fixture(scope="module")
def extract_answer() -> Callable[[str], str | None]:
    from reasoning_gym import utils  # takes longer than an example may take

    return utils.extract_answer


@needs_library
@given(st.text("<>/answer 42\n", max_size=40))
def test_tags_are_read_as_the_library_reads_them(extract_answer: Callable[[str], str | None], text: str):
    text = f"{text}<answer>{text[:9]}</answer>{text[9:]}"
    answer = extract_answer(text)
    assert grade("reasoning-gym", "tags", text, answer or "") == bool(answer)


# --- settings at fault ------------------------------------------------------------------------------------------------


def test_without_the_library_it_names_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"task.name: .* package reasoning-gym,.* -r requirements-laptop.txt$"):
        make_task()


@needs_library
def test_without_a_package_that_the_library_needs_it_names_this_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "zss", None)
    with pytest.raises(ConfigError, match=r"task.name: 'reasoning-gym' .* package zss,"):
        make_task()


@pytest.mark.parametrize("field", ["train", "test", "template"])
def test_what_data_sets_bring_cannot_be_chosen(field: str):
    with pytest.raises(ConfigError, match=f"task.{field} must be empty: .*'some'"):
        ReasoningGym(TaskConfig(name="reasoning-gym", options={"datasets": "gcd"}, **{field: "some"}))


def test_an_unknown_rule_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"task\.rule must be one of auto, .*, got 'best'"):
        make_task(rule="best")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "task.options.datasets: field required"),
        ({"datasets": []}, "task.options.datasets must name at least one data set, got []"),
        ({"datasets": "gcd", "train_sise": 3}, "unknown setting 'task.options.train_sise'"),
        ({"datasets": "gcd", "train_size": 0}, "task.options.train_size must be greater than or equal to 1, got 0"),
        ({"datasets": "gcd", "test_size": "many"}, "task.options.test_size"),
        ({"datasets": [{"name": "gcd", "weight": 0}]}, "task.options.datasets.0.weight must be greater than 0, got 0"),
        ({"datasets": ["gcd", {"weight": 2}]}, "task.options.datasets.1.name: field required"),
        ({"datasets": [{"name": "gcd", "wait": 2}]}, "unknown setting 'task.options.datasets.0.wait'"),
        ({"datasets": [3]}, "task.options.datasets.0"),
        ({"datasets": {"gcd": 2}}, "task.options.datasets.gcd must be an object, such as "),
        ({"datasets": {"gcd": {"wait": 2}}}, "unknown setting 'task.options.datasets.0.wait'"),
    ],
)
def test_options_at_fault_are_named(options: dict[str, Any], says: str):
    with pytest.raises(ConfigError) as refused:
        ReasoningGym(TaskConfig(name="reasoning-gym", options=options))
    assert says in str(refused.value)


@needs_library
@pytest.mark.parametrize(
    ("dataset", "says"),
    [
        ({"name": "chainsum"}, "datasets.0.name must be .*, got 'chainsum'; did you mean chain_sum"),
        ({"name": "xyzzy"}, "datasets.0.name must be .*, got 'xyzzy'; known: ab, acre, .*zebra_puzzles"),
        ({"name": "composite"}, "datasets.0.name: 'composite' cannot be used: it mixes data sets"),
        ({"name": "gcd", "settings": {"size": 3}}, "datasets.0.settings.size must be left out.*_size .*, got 3"),
        ({"name": "gcd", "settings": {"seed": 3}}, "datasets.0.settings.seed must be left out.*options.seed .*, got 3"),
        ({"name": "gcd", "settings": {"mn": 3}}, "'task.options.datasets.0.settings.mn' .*; known: min_numbers, "),
        ({"name": "gcd", "settings": {"min_value": "few"}}, "datasets.0.settings.min_value: .*, got 'few'"),
        ({"name": "gcd", "settings": {"min_value": 9, "max_value": 3}}, "'gcd' refuses min_value=9, max_value=3: "),
    ],
)
def test_a_data_set_or_setting_that_the_library_does_not_have_is_refused(dataset: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        make_task([dataset])


def test_data_sets_are_given_as_a_name_a_list_or_an_object():
    def datasets(value: Any) -> tuple[DataSet, ...]:
        return parse_options(Options, TaskConfig(options={"datasets": value})).datasets

    gcd, lcm = DataSet(name="gcd"), DataSet(name="lcm", weight=3, settings={"max_value": 50})
    assert datasets("gcd") == datasets(["gcd"]) == datasets({"gcd": {}}) == datasets({"name": "gcd"}) == (gcd,)
    mixed = {"weight": 3, "settings": {"max_value": 50}}
    assert datasets(["gcd", {"name": "lcm", **mixed}]) == datasets({"gcd": {}, "lcm": mixed}) == (gcd, lcm)


# --- train and test ---------------------------------------------------------------------------------------------------


@needs_library
def test_no_problem_is_in_both_splits_or_twice_in_one_even_if_the_data_set_has_few(library: Library):
    task = make_task(train_size=150, test_size=40, library=library)  # of 200
    train, test = prompts_of(task), prompts_of(task, "test")
    assert (len(train), len(test)) == (150, 40)
    assert len({prompt.text for prompt in (*train, *test)}) == 190
    assert len({prompt.prompt_id for prompt in (*train, *test)}) == 190


@needs_library
@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"train_size": 190, "test_size": 40}, "task.options.train_size: 190 .*'chain_sum'.* only 160 different ones"),
        ({"train_size": 40, "test_size": 300}, "task.options.test_size: 300 .*'chain_sum'.* only 200 different ones"),
    ],
)
def test_a_data_set_with_too_few_problems_is_refused_with_the_size_and_what_there_is(
    library: Library, sizes: dict[str, int], says: str
):
    task = make_task(**sizes, library=library)
    with pytest.raises(ConfigError, match=says):
        prompts_of(task)


@needs_library
def test_problems_that_are_too_long_are_replaced_by_others_or_named(library: Library):
    task = make_task(
        {"name": "chain_sum", "settings": {"min_terms": 2, "max_terms": 9, "max_digits": 1}}, library=library
    )
    longest = max(len(prompt.tokens) for prompt in prompts_of(task))
    shorter = prompts_of(task, max_tokens=longest - 1)
    assert len(shorter) == 40 and max(len(prompt.tokens) for prompt in shorter) < longest
    with pytest.raises(ConfigError, match=r"test_size: .* were longer than search\.max_prompt_tokens allows"):
        prompts_of(task, max_tokens=9)


@needs_library
def test_the_seed_decides_the_problems_and_the_size_of_training_leaves_those_for_evaluation_alone(sums: ReasoningGym):
    same = make_task()
    with closing(same.library):  # another process
        assert prompts_of(same) == prompts_of(sums) and prompts_of(same, "test") == prompts_of(sums, "test")
    more, other = make_task(train_size=80, library=sums.library), make_task(seed=1, library=sums.library)
    assert prompts_of(more, "test") == prompts_of(sums, "test")
    assert {prompt.text for prompt in prompts_of(other)} != {prompt.text for prompt in prompts_of(sums)}


@needs_library
def test_a_mixture_has_its_weights_from_the_first_prompts_on_and_a_measure_for_each_data_set(library: Library):
    task = make_task([{"name": "chain_sum", "weight": 3}, "gcd"], library=library)
    names = [prompt.metadata["dataset"] for prompt in prompts_of(task)]
    assert names.count("chain_sum") == 30 and names[:8].count("chain_sum") == 6
    asked = [(prompt, response_of("no answer")) for prompt in prompts_of(task, "test")]
    rewards = [task.reward(prompt, response_of(prompt.answer)) for prompt, _ in asked]
    rewards[0] = task.reward(*asked[0])
    assert isinstance(task, Measures) and asked[0][0].metadata["dataset"] == "chain_sum"
    assert task.measures(asked, rewards, None) == {"chain_sum": pytest.approx(7 / 8), "gcd": 1.0}


@needs_library
def test_one_data_set_needs_no_measure_of_its_own(sums: ReasoningGym):
    [prompt, *_] = prompts_of(sums)
    asked = (prompt, response_of(prompt.answer))
    assert sums.measures([asked], [sums.reward(*asked)], None) == {}


# --- prompts ----------------------------------------------------------------------------------------------------------


@needs_library
def test_the_question_is_in_the_chat_template_with_the_system_message_and_the_instruction(library: Library):
    task = make_task(system="Add.", instruction="Only the number.", library=library)
    rendered, plain = prompts_of(task, template=TEMPLATE)[0], prompts_of(task)[0]
    question = rendered.metadata["entry"]["question"]
    assert rendered.text == f"system:Add.<eos>user:{question}\n\nOnly the number.<eos>A:"
    assert plain.text == f"Add.\n{question}\n\nOnly the number.\n"
    assert plain.metadata == rendered.metadata and plain.answer == plain.metadata["entry"]["answer"]


@needs_library
def test_by_default_a_short_instruction_follows_the_question_and_without_it_the_question_stands_alone(
    library: Library,
    sums: ReasoningGym,
):
    first = prompts_of(sums, template=TEMPLATE)[0]
    assert first.text == f"user:{first.metadata['entry']['question']}\n\nWrite only the result.<eos>A:"
    bare = make_task(instruction="", library=library)
    first = prompts_of(bare, template=TEMPLATE)[0]
    assert first.text == f"user:{first.metadata['entry']['question']}<eos>A:"


# --- rewards ----------------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize(
    ("rule", "wording", "value", "parts"),
    [
        ("", "It is {}.", 1.0, {**NO_WAY, "by_last_number": 1}),
        ("auto", "It is <answer>{}</answer>", 1.0, {**NO_WAY, "by_tags": 1}),
        ("auto", "Well", 0.0, {**NO_WAY, "by_whole": 1}),
        ("auto", "", 0.0, NO_WAY),
        ("last-number", "It is {}.", 1.0, {"by_last_number": 1, "unscored": 0}),
        ("last-number", "I do not know.", 0.0, {"by_last_number": 0, "unscored": 0}),
        ("tags", "{}", 0.0, {"by_tags": 0, "unscored": 0}),
    ],
)
def test_a_reward_says_by_which_rule_the_answer_was_read(
    library: Library, rule: str, wording: str, value: float, parts: dict[str, int]
):
    task = make_task(rule=rule, library=library)
    [prompt, *_] = prompts_of(task)
    reward = task.reward(prompt, response_of(wording.format(prompt.answer)))
    assert (reward.value, reward.parts) == (value, parts)


@needs_library
def test_the_scorer_of_the_data_set_gives_a_part_for_an_answer_with_words(library: Library):
    task = make_task(rule="whole", library=library)
    [prompt, *_] = prompts_of(task)
    reward = task.reward(prompt, response_of(f"{prompt.answer} is it!"))
    assert reward.value == pytest.approx(len(prompt.answer) / len(f"{prompt.answer} is it!"))


@needs_library
def test_where_the_right_answer_is_no_number_the_default_rule_reads_the_whole_response(library: Library):
    task = make_task({"name": "spell_backward"}, library=library)
    [prompt, *_] = prompts_of(task)
    reward = task.reward(prompt, response_of(f" {prompt.answer}\n"))
    assert (reward.value, reward.parts) == (1.0, {**NO_WAY, "by_whole": 1})


@needs_library
def test_a_stored_prompt_is_all_that_a_reward_needs(library: Library):
    task = make_task({"name": "decimal_arithmetic", "settings": {"precision": 9}}, library=library)
    other = make_task("gcd", library=library)
    [prompt, *_] = prompts_of(task)
    assert other.reward(prompt, response_of(prompt.answer)).value == 1.0


@needs_library
@pytest.mark.parametrize(("name", "answer"), [("puzzle24", "9**9**9**9"), ("coin_flip", "1e999999999")])
def test_a_scorer_that_takes_forever_gives_nothing_and_the_next_answer_is_scored(
    library: Library, name: str, answer: str
):
    task = make_task(name, train_size=2, test_size=1, library=library)
    [prompt, *_] = prompts_of(task)
    forever = task.reward(prompt, response_of(answer))
    assert (forever.value, forever.parts["unscored"]) == (0.0, 1.0)
    scored = task.reward(prompt, response_of(prompt.answer))
    assert (scored.value, scored.parts["unscored"]) == (1.0, 0.0)


@needs_library
def test_importing_and_checking_the_task_loads_neither_the_library_nor_torch():
    script = (
        "import sys\n"
        "from tba.config import TaskConfig\n"
        "from tba.tasks.registry import get_task\n"
        "get_task(TaskConfig(name='reasoning-gym', options={'datasets': 'gcd'}))\n"
        "assert not {'reasoning_gym', 'sympy', 'torch'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# --- problems as JSON -------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda values: (
        st.lists(values, max_size=3)
        | st.lists(values, max_size=3).map(tuple)
        | st.dictionaries(st.sampled_from(["tuple", "items", "a"]) | st.integers(), values, max_size=3)
    ),
)


@hypothesis_settings(suppress_health_check=[HealthCheck.too_slow])  # which a busy machine can cause
@given(JSON)
def test_a_problem_is_the_same_after_json(value: Any):
    again = decode(json.loads(json.dumps(encode(value))))
    assert repr(again) == repr(value)


def test_what_is_neither_json_nor_a_tuple_is_refused():
    with pytest.raises(TypeError, match=r"must consist of JSON and tuples, got \{3\}"):
        encode([{3}])
