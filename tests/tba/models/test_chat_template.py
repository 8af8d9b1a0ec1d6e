from typing import Any

import pytest

from benchmarks.harness.tiny_models import EOS_ID, tiny_tokenizer
from tba.errors import DataError
from tba.models import chat_template

CHARACTERS = "abcdefghijklmnopqrstuvwxyzSUAT:=<>/() \n"
TEMPLATE = """{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set thought = message.content.split('</think>') %}
{{- 'A:' + (message.content if loop.last else thought[-1]) + eos_token + '\n' }}
{%- else %}
{{- message.role[0].upper() + ':' + message.content + '\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'A:' }}{%- endif %}"""
QUESTION = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "who"}]
AFTER = [{"role": "user", "content": "why"}, {"role": "tool", "content": "c"}]


def tokenizer_with(template: str | None) -> Any:
    tokenizer = tiny_tokenizer(CHARACTERS)
    tokenizer.chat_template = template
    return tokenizer


def said(answer: str) -> dict[str, str]:
    return {"role": "assistant", "content": answer}


def test_what_the_policy_has_read_when_it_is_its_turn_again_is_what_the_template_says():
    tokenizer = tokenizer_with(TEMPLATE)
    opening = chat_template.opening(tokenizer, QUESTION)
    tokens = chat_template.tokens(tokenizer, QUESTION, opening)
    for answer in ("me", "", "a mark (the answer)"):
        whole = [*QUESTION, said(answer), *AFTER]
        answered = tokenizer(answer, add_special_tokens=False).input_ids
        between = chat_template.between(tokenizer, QUESTION, AFTER)
        read = [*tokens, *answered, EOS_ID, *between]
        assert read == tokenizer(chat_template.opening(tokenizer, whole), add_special_tokens=False).input_ids


def test_what_comes_between_two_answers_does_not_depend_on_what_the_template_makes_of_earlier_ones():
    tokenizer = tokenizer_with(TEMPLATE)
    thinking = "<think>long</think>so"
    assert thinking not in chat_template.opening(tokenizer, [*QUESTION, said(thinking), *AFTER])
    first = [*QUESTION, said(thinking), *AFTER]
    found = [chat_template.between(tokenizer, before, AFTER) for before in (QUESTION, first)]
    assert tokenizer.decode(found[0]) == "\nU:why\nT:c\nA:" and found[0] == found[1]


def test_the_end_token_is_left_out_only_where_the_template_ends_with_it():
    tokenizer = tokenizer_with(TEMPLATE.replace("eos_token", "'<end>'"))
    assert tokenizer.decode(chat_template.between(tokenizer, QUESTION, AFTER)).startswith("<end>\nU:why")


def test_environments_that_quote_are_not_mistaken_for_the_answer():
    tokenizer = tokenizer_with(TEMPLATE)
    for quoted in ("(the answer)", "((the answer))"):
        before, after = [*QUESTION, said(quoted), *AFTER], [{"role": "user", "content": f"{quoted} is no"}]
        assert tokenizer.decode(chat_template.between(tokenizer, before, after)) == f"\nU:{quoted} is no\nA:"


def test_without_a_template_messages_are_lines():
    tokenizer = tokenizer_with(None)
    assert chat_template.opening(tokenizer, QUESTION) == "be kind\nwho\n"
    assert tokenizer.decode(chat_template.between(tokenizer, QUESTION, AFTER)) == "\nwhy\nc\n"


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_plain_text_stays_as_it_is(template: str | None):
    tokenizer, text = tokenizer_with(template), [{"role": "text", "content": "who"}]
    assert chat_template.opening(tokenizer, text) == "who"
    assert tokenizer.decode(chat_template.between(tokenizer, text, [{"role": "text", "content": " why"}])) == " why"
    assert tokenizer.decode(chat_template.between(tokenizer, text, AFTER[:1])) == "\nwhy\n"


def test_what_a_template_refuses_or_hides_is_said():
    refusing = tokenizer_with("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(DataError, match="chat template refuses these messages: roles must alternate"):
        chat_template.opening(refusing, QUESTION)
    with pytest.raises(DataError, match="does not show the last message of the assistant"):
        chat_template.between(tokenizer_with("{{ messages[0].content }}"), QUESTION, AFTER)


@pytest.mark.parametrize(
    ("text", "says", "calls"),
    [
        ("", "", []),
        ("just text", "just text", []),
        ('So. <tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>', "So.", [("f", '{"x": 1}')]),
        ('<tool_call>\n{"name": "f", "arguments": {}}\n', "", [("f", "{}")]),  # as long as it is whole
        (
            '<tool_call>{"name": "f", "arguments": {"x": "é"}}</tool_call>\n<tool_call>{"name": "g", "arguments": 3}'
            "</tool_call>",
            "",
            [("f", '{"x": "é"}'), ("g", "3")],
        ),
        ("<tool_call>f(1)</tool_call>", "<tool_call>f(1)</tool_call>", []),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", []),
        (
            '<tool_call>{"name": 1, "arguments": 2}</tool_call>',
            '<tool_call>{"name": 1, "arguments": 2}</tool_call>',
            [],
        ),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
    ],
)
def test_calls_of_tools_are_read_out_of_an_answer(text: str, says: str, calls: list[tuple[str, str]]):
    assert chat_template.split_calls(text) == (says, calls)


def test_nothing_that_a_model_may_write_raises():
    for text in ("<tool_call>" * 1000, "<tool_call>" + "[" * 100_000, "<tool_call>" + "1" * 10_000, "</tool_call>"):
        assert chat_template.split_calls(text) == (text, [])
