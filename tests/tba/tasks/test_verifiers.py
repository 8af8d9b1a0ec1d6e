"""Environments of the real library. Without it, only that it is asked for; CI installs it beside (.ci/run)."""

import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest

from tba.config import TaskConfig
from tba.errors import ConfigError, DataError, RunFailed
from tba.interfaces import ScoresTogether, TakesTurns
from tba.tasks.registry import get_task
from tba.tasks.verifiers import Verifiers
from tba.types import Prompt
from tests.support.tba.verifiers_examples import CALLS, TEMPLATE, calling_tokenizer, response_of

needs_library = pytest.mark.skipif(not find_spec("verifiers"), reason="the extra `verifiers` is not installed")


def make_task(kind: str, errors: str = "raise", **arguments: Any) -> Verifiers:
    options = {
        "environment": "tests.support.tba.environments",
        "arguments": {"kind": kind, **arguments},
        "errors": errors,
    }
    task = get_task(TaskConfig(name="verifiers", options=options))
    assert isinstance(task, Verifiers)
    return task


def prompts_of(task: Verifiers, split: str = "train", template: str | None = TEMPLATE) -> list[Prompt]:
    """Return prompts as searchers and evaluators read them from storage."""
    prompts = task.prompts(split, [], calling_tokenizer(template), max_tokens=99)
    return [replace(prompt, metadata=json.loads(json.dumps(prompt.metadata))) for prompt in prompts]


def talk(task: Verifiers, prompt: Prompt, says: Sequence[str], template: str | None = TEMPLATE) -> list[str]:
    """Return the decoded turns, with end tokens, of a policy that says these texts until the environment ends."""
    tokenizer, turns, shown = calling_tokenizer(template), list[str](), list[str]()
    for said in says:
        turns, shown = [*turns, said], [*shown, said]
        tokens = task.reply(prompt, turns, tokenizer)
        if tokens is None:
            return shown
        turns.append(tokenizer.decode(tokens, skip_special_tokens=True))
        shown.append(tokenizer.decode(tokens))
    return shown


@pytest.mark.skipif(bool(find_spec("verifiers")), reason="the extra `verifiers` is installed")
def test_without_the_library_it_names_what_to_install():
    with pytest.raises(ConfigError, match=r"needs the library verifiers.*: pip .* -r requirements-verifiers.txt"):
        make_task("single")


@pytest.mark.parametrize("field", ["train", "test", "rule", "template"])
def test_what_an_environment_brings_cannot_be_chosen(field: str):
    with pytest.raises(ConfigError, match=f"task.{field} must be empty: an environment has its own"):
        Verifiers(TaskConfig(name="verifiers", options={"environment": "x"}, **{field: "some"}))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "task.options.environment"),
        ({"environment": "x", "argument": 1}, "unknown setting 'task.options.argument'"),
        ({"environment": "x", "errors": "hide"}, "task.options.errors"),
    ],
)
def test_options_at_fault_are_named(options: dict[str, Any], says: str):
    with pytest.raises(ConfigError) as refused:
        Verifiers(TaskConfig(name="verifiers", options=options))
    assert says in str(refused.value)


@needs_library
@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ("primeintellect/no-such-env", "no module 'no_such_env' for 'primeintellect/no-such-env'; is it installed"),
        ("no.such.module", "no module 'no.such.module'"),
    ],
)
def test_an_environment_that_is_not_there_is_refused_at_once(environment: str, says: str):
    with pytest.raises(ConfigError) as refused:
        get_task(TaskConfig(name="verifiers", options={"environment": environment}))
    assert says in str(refused.value)


@needs_library
@pytest.mark.parametrize(
    ("environment", "arguments", "says"),
    [
        ("json", {}, "'json' cannot be loaded: "),
        ("tests.support.tba.environments", {"kind": "unheard-of"}, "cannot be loaded: .*unheard-of"),
        ("tests.support.tba.environments", {}, "cannot be loaded: .*'kind'"),
        ("tests.support.tba.environments", {"kind": "compared"}, "rewards responses by comparing those of a group"),
    ],
)
def test_what_cannot_be_used_as_an_environment_is_refused(environment: str, arguments: dict[str, Any], says: str):
    task = get_task(TaskConfig(name="verifiers", options={"environment": environment, "arguments": arguments}))
    with pytest.raises(ConfigError, match=f"task.options.environment: .*{says}"):
        task.prompts("train", [], calling_tokenizer(), max_tokens=99)


@needs_library
def test_an_environment_leaves_the_signals_to_the_role():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    prompts_of(make_task("single"))
    assert {number: signal.getsignal(number) for number in before} == before


# --- prompts ----------------------------------------------------------------------------------------------------------


@needs_library
@pytest.mark.parametrize(("template", "text"), [(TEMPLATE, "Q:01\nA:"), (None, "01\n")])
def test_prompts_are_those_of_the_dataset_in_the_chat_template_or_plainly(template: str | None, text: str):
    task = make_task("single")
    train, test = (prompts_of(task, split, template) for split in ("train", "test"))
    assert [prompt.answer for prompt in train] == ["0", "1", "00", "01", "10", "11"]
    assert [prompt.prompt_id for prompt in test] == ["test-00000", "test-00001"]
    tokenizer = calling_tokenizer()
    for prompt in (train[3], test[0]):
        assert prompt.text == text == tokenizer.decode(prompt.tokens)
        assert prompt.metadata["row"]["info"] == {"length": 2}
    short = task.prompts("train", [], calling_tokenizer(template), max_tokens=len(train[0].tokens))
    assert [prompt.answer for prompt in short] == ["0", "1"]


@needs_library
def test_the_system_prompt_and_examples_of_an_environment_are_in_its_prompts():
    shots = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "0"}]
    [first, *_] = prompts_of(make_task("single", system_prompt="Tip", few_shot=shots))
    assert first.text == "Q:Tip\nQ:1\nA:0<eos>\nQ:0\nA:"


@needs_library
def test_an_environment_that_asks_with_plain_text_gets_no_template():
    task = make_task("text")
    [prompt] = prompts_of(task)
    assert prompt.text == "0?" and prompts_of(task, "test")[0].text == "0?"  # the environment has no evaluation dataset
    assert task.reward(prompt, response_of("10")).value == 0.5


@needs_library
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("dates", "field 'when' must be JSON, got datetime"),
        ("images", "a message contains 'image_url', but a policy reads only text"),
    ],
)
def test_a_row_that_cannot_be_kept_or_read_is_named(kind: str, says: str):
    with pytest.raises(DataError, match=f"train row 0: {says}"):
        prompts_of(make_task(kind))


@needs_library
@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "no chat template that shows them"),
        (TEMPLATE.replace("{% if tools %}", "{% if false %}"), "no chat template that shows them"),
        (TEMPLATE.replace("call.function | tojson", "call.function.name"), "must write tool calls as <tool_call>"),
        (TEMPLATE.replace("message.tool_calls or []", "[]"), "must write tool calls as <tool_call>"),
    ],
)
def test_tools_that_the_policy_would_not_learn_to_call_are_refused(template: str | None, says: str):
    with pytest.raises(DataError, match=says):
        prompts_of(make_task("tools"), template=template)


# --- turns ------------------------------------------------------------------------------------------------------------


@needs_library
def test_an_environment_of_one_turn_never_answers():
    task = make_task("single")
    assert isinstance(task, TakesTurns) and isinstance(task, ScoresTogether)
    assert talk(task, prompts_of(task)[0], ["1", "more"]) == ["1"]


@needs_library
@pytest.mark.parametrize(("template", "frame"), [(TEMPLATE, "\nQ:{}\nA:"), (None, "\n{}\n")])
def test_what_an_environment_keeps_in_mind_follows_from_the_turns(template: str | None, frame: str):
    task = make_task("countdown")
    prompt = prompts_of(task, template=template)[0]
    turns = ["1", frame.format("1"), "0", frame.format("1"), "0110", frame.format("111"), "so"]
    assert talk(task, prompt, [*turns[::2], "never said"], template) == turns
    other = make_task("countdown")  # like another process, after a restart
    tokens = [it.reply(prompt, turns[:5], calling_tokenizer(template)) for it in (task, other, task)]
    assert tokens[0] is not None and tokens[0] == tokens[1] == tokens[2]


@needs_library
def test_a_template_may_tell_the_time():
    task, template = make_task("countdown"), "{{ strftime_now('%f') }}" + TEMPLATE
    turns = ["1", "\nQ:1\nA:", "0", "\nQ:1\nA:"]
    assert talk(task, prompts_of(task, template=template)[0], ["1", "0"], template) == turns


@needs_library
def test_limits_of_the_environment_end_a_response():
    task = make_task("countdown", max_turns=2)
    assert len(talk(task, prompts_of(task)[0], ["0"] * 5)) == 3


@needs_library
def test_a_last_word_of_the_environment_ends_a_response():
    task = make_task("countdown")
    assert talk(task, prompts_of(task)[0], ["0", "", "1"]) == ["0", "\nQ:\nA:", ""]


@needs_library
def test_tools_are_called_and_say_what_they_return():
    task = make_task("tools")
    prompt = prompts_of(task)[0]
    assert prompt.text == "T:flip \nQ:0\nA:"
    says = [f"10{CALLS[1]}", f"{CALLS[0]}{CALLS[1]}", "11", "never said"]
    assert talk(task, prompt, says) == [says[0], "\nR:01\nA:", says[1], "\nR:1\nR:01\nA:", "11"]


@needs_library
@pytest.mark.parametrize(
    ("call", "heard"),
    [
        ('{"name": "flip", "arguments": {"bits": 1}}', "R:"),  # the tool itself fails, and its error is what it says
        ('{"name": "turn", "arguments": {"bits": "1"}}', "R:"),
        ('{"name": "flip", "arguments": ["1"]}', "R:"),
        ('{"name": "flip", "arguments": {"bits": "1"}', None),  # no JSON: no call, which ends the response
        ('{"name": "flip"}', None),
        ("flip", None),
        ("", None),
        ("[" * 100_000, None),
    ],
)
def test_a_call_that_goes_wrong_is_heard_of_or_ends_the_response(call: str, heard: str | None):
    task = make_task("tools")
    turns = talk(task, prompts_of(task)[0], [f"<tool_call>{call}</tool_call>"])
    assert len(turns) == (1 if heard is None else 2) and (heard or "") in turns[-1]


@needs_library
def test_environments_in_a_group_each_answer_and_reward_in_their_own_way():
    task = make_task("group")
    prompts = prompts_of(task)
    assert len(prompts) == 12
    assert talk(task, prompts[3], ["1", "1"]) == ["1"]
    assert talk(task, prompts[9], ["1", ""]) == ["1", "\nQ:1\nA:", ""]
    assert task.reward(prompts[9], response_of("01", "\nQ:1\nA:", "11")).value == 1.5


@needs_library
@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("fickle", "does not repeat what it said before"),
        ("dealt", "does not repeat what it said before"),
        ("forgetful", "changes messages or tools that the policy has read"),
        ("broken", "InfraError: no sandbox"),
    ],
)
def test_environments_that_a_task_cannot_be_are_refused_where_they_show_it(kind: str, says: str):
    task = make_task(kind)
    with pytest.raises(RunFailed, match=f"train-00000: environment 'tests.support.tba.environments': {says}"):
        talk(task, prompts_of(task)[0], ["0", "1", "0"])


# --- rewards ----------------------------------------------------------------------------------------------------------


@needs_library
def test_rewards_are_the_rubrics_with_its_metrics_beside():
    task = make_task("countdown")
    prompt = prompts_of(task)[3]  # 01
    first, second, cut = task.rewards(
        [
            (prompt, response_of("11", "\nQ:11\nA:", "0011")),
            (prompt, response_of("0")),
            (prompt, response_of("0", "\nQ:\nA:", "011", finished=False)),
        ]
    )
    assert (first.value, first.parts) == (1.0, {"ones": 0.5, "as_long": 1.0, "num_turns": 2.0})
    assert (second.value, second.parts) == (0.0, {"ones": 0.0, "as_long": 0.0, "num_turns": 1.0})
    assert cut.value == pytest.approx(2 / 3) and cut.parts["num_turns"] == 2.0


@needs_library
def test_a_response_that_is_cut_off_is_truncated_to_the_rubric():
    task = make_task("whole")
    prompt = prompts_of(task)[0]
    assert [task.reward(prompt, response_of("1", finished=it)).value for it in (True, False)] == [1.0, 0.0]


@needs_library
def test_rewards_of_an_environment_that_asks_something_else_are_refused():
    task = make_task("dealt")
    with pytest.raises(RunFailed, match="does not repeat what it said before"):
        task.reward(prompts_of(task)[0], response_of("1"))


@needs_library
def test_tools_that_were_called_are_counted():
    task = make_task("tools")
    turns = (f"1{CALLS[0]}{CALLS[1]}", "\nR:1\nR:01\nA:", "11")
    reward = task.reward(prompts_of(task)[3], response_of(*turns))
    assert reward.parts["flip_calls"] == reward.parts["total_tool_calls"] == 2.0
    assert reward.parts["ones"] == 1.0 and reward.parts["as_long"] == 0.0


@needs_library
def test_what_fails_fails_unless_it_is_asked_to_be_passed_over():
    asked = [response_of("11"), response_of("")]
    task = make_task("failing")
    prompt = prompts_of(task)[0]
    assert task.reward(prompt, asked[0]).value == 0.5
    with pytest.raises(RunFailed, match=r"train-00000: environment .*: reward function 'fails': ZeroDivisionError"):
        task.rewards([(prompt, it) for it in asked])
    lenient = make_task("failing", errors="zero")
    assert [it.value for it in lenient.rewards([(prompt, it) for it in asked])] == [0.5, 0.0]
    broken = make_task("broken", errors="zero")
    assert talk(broken, prompt, ["1", "1"]) == ["1"]
    assert broken.reward(prompt, response_of("1")).value == 1.5


@needs_library
def test_a_response_that_goes_on_after_its_end_is_refused():
    task = make_task("single")
    with pytest.raises(RunFailed, match="ends after 1 answers, but took 2 before"):
        task.reward(prompts_of(task)[0], response_of("1", "\nQ:1\nA:", "1"))
