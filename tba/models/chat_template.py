"""Messages as a model reads and writes them: by the chat template of its tokenizer, or plainly where it has none."""

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
    """All that comes before the policy's answer. Plainly that is the messages, a line each; those of role `text` stand
    as they are, whatever the tokenizer has."""
    if not _is_rendered(tokenizer, messages):
        return "".join(map(_line, messages))
    return _rendered(tokenizer, messages, tools)


def check_tools(tokenizer: Any, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
    """DataError if the policy would not be told of the tools, or told to call them in a way that is not understood."""
    if not tools:
        return
    if opening(tokenizer, messages, tools) == opening(tokenizer, messages):
        raise DataError("there are tools to call, and the tokenizer has no chat template that shows them to the policy")
    name, arguments = tools[0]["function"]["name"], {"x": 1}
    function = {"name": name, "arguments": arguments}
    call = {"id": "call-0-0", "type": "function", "function": function}
    called = opening(tokenizer, [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}], tools)
    if split_calls(called[called.rfind("<tool_call>") :])[1] != [(name, json.dumps(arguments))]:
        raise DataError(
            'the tokenizer\'s chat template calls tools otherwise than by <tool_call>{"name": …, "arguments": …}'
            "</tool_call>, and that alone is understood"
        )


def tokens(tokenizer: Any, messages: Sequence[Message], text: str) -> list[int]:
    """Of an opening; a template has written the special tokens already."""
    return tokenizer(text, add_special_tokens=not _is_rendered(tokenizer, messages)).input_ids


def between(
    tokenizer: Any, before: Sequence[Message], after: Sequence[Message], tools: Sequence[Tool] = ()
) -> list[int]:
    """The tokens from the end of the policy's answer to `before` up to where its next one begins, with the messages
    `after` that come in between.

    A mark is rendered in place of the answer, and what follows the mark is taken. So it does not depend on what the
    policy wrote, and nothing that was said is written anew: not as other templates leave the thinking out of earlier
    answers, nor as tools are called in other words. The end token, which the policy has written itself, is left out.
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
        raise DataError("the tokenizer's chat template does not show what an assistant said last")
    found = tokenizer(tail, add_special_tokens=False).input_ids
    return found[1:] if found[:1] == [tokenizer.eos_token_id] else found


def split_calls(text: str) -> tuple[str, list[tuple[str, str]]]:
    """An answer as what it says and the tools that it calls, each by name and arguments in JSON: the objects with
    `name` and `arguments` that it writes between <tool_call> and </tool_call>. If one of them is something else, the
    whole is text and calls nothing."""
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
    except Exception as error:  # whatever a template raises, in words of its own
        raise DataError(f"the tokenizer's chat template refuses these messages: {error}") from error
