"""Convert messages to the text that a model reads, and parse the tool calls in the model's answers. The text is
rendered by the tokenizer's chat template, or else has one plain line per message."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tba.errors import DataError

Message = Mapping[str, Any]
Tool = Mapping[str, Any]
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def opening(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> str:
    """Return the text up to the point where the policy's answer begins. The tokenizer's chat template renders this
    text. Without a template, or if any message has the role `text`, the text is the plain messages, one per line;
    messages of role `text` get no line break."""
    if not _is_rendered(tokenizer, messages):
        return "".join(map(_line, messages))
    return _rendered(tokenizer, messages, tools)


def check_tools(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """Raise DataError if the chat template does not show the tools to the policy, or uses a format of tool calls that
    `split_calls` cannot read."""
    if not tools:
        return
    if opening(tokenizer, messages, tools) == opening(tokenizer, messages):
        raise DataError("the task has tools, but the tokenizer has no chat template that shows them to the policy")
    name, arguments = tools[0]["function"]["name"], {"x": 1}
    function = {"name": name, "arguments": arguments}
    call = {"id": "call-0-0", "type": "function", "function": function}
    called = opening(tokenizer, [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}], tools)
    if split_calls(called[called.rfind("<tool_call>") :])[1] != [(name, json.dumps(arguments))]:
        raise DataError(
            'the tokenizer\'s chat template must write tool calls as <tool_call>{"name": …, "arguments": …}'
            "</tool_call>: no other form is understood"
        )


def tokens(tokenizer: Any, messages: Sequence[Message], text: str) -> list[int]:
    """Return the tokens of an opening. The tokenizer adds special tokens only to plain text, because a chat template
    has written them already."""
    return tokenizer(text, add_special_tokens=not _is_rendered(tokenizer, messages)).input_ids


def between(
    tokenizer: Any, before: Sequence[Message], after: Sequence[Message], tools: Sequence[Tool] = ()
) -> list[int]:
    """Return the tokens between two answers of the policy: from the end of its answer to `before` up to the start of
    its next answer. The messages `after` lie between the two answers, and are part of these tokens.

    The template renders a mark in place of the answer, and the text after the mark is returned. So the tokens do not
    depend on the answer, and no earlier answer is rendered again: some templates would drop its thinking or write its
    tool calls differently. An end token right after the answer is left out, as the policy has written it itself.
    """
    if not _is_rendered(tokenizer, before):
        raw = bool(after) and after[0]["role"] == "text"
        text = ("" if raw else "\n") + "".join(map(_line, after))
        return tokenizer(text, add_special_tokens=False).input_ids
    mark = "(the answer)"
    while mark in str(before) or mark in str(after):
        mark = f"({mark})"
    rendered = _rendered(tokenizer, [*before, {"role": "assistant", "content": mark}, *after], tools)
    _, shown, tail = rendered.rpartition(mark)
    if not shown:
        raise DataError("the tokenizer's chat template does not show the last message of the assistant")
    found = tokenizer(tail, add_special_tokens=False).input_ids
    return found[1:] if found[:1] == [tokenizer.eos_token_id] else found


def split_calls(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Split an answer into the text before its first tool call, and its tool calls, each as a name and the arguments in
    JSON. A call is a JSON object with `name` and `arguments` between <tool_call> and </tool_call>. If any of these
    calls is malformed, the whole answer is text and has no calls."""
    try:
        calls = [json.loads(call) for call in _CALL.findall(text)]
        found = [(call["name"], json.dumps(call["arguments"], ensure_ascii=False)) for call in calls]
    except (ValueError, KeyError, TypeError, RecursionError):
        return text, []
    if not found or not all(isinstance(name, str) for name, _ in found):
        return text, []
    return text[: text.index("<tool_call>")].strip(), found


def _is_rendered(tokenizer: Any, messages: Sequence[Message]) -> bool:
    return has_template(tokenizer) and not any(message["role"] == "text" for message in messages)


def _line(message: Message) -> str:
    return message["content"] if message["role"] == "text" else f"{message['content']}\n"


def _rendered(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Tool]) -> str:
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:  # a template may raise anything
        raise DataError(f"the tokenizer's chat template refuses these messages: {error}") from error
