"""A client that the library `verifiers` asks for answers of the policy. The client repeats recorded answers."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tba.errors import DataError
from tba.models import chat_template

Asked = tuple[list[dict[str, Any]], list[dict[str, Any]]]
"""The messages and the tools that a policy is asked with, in the form that chat templates take."""


class RepeatingClient:
    """Repeats the given `answers`, and records what the library asks. After the last answer it reports that the context
    window is full, which makes every environment end in the normal way."""

    def __init__(self, library: Any, answers: Sequence[str], *, cut_off: bool):
        self.library, self.answers = library, answers
        self.cut_off = cut_off  # whether the last answer was cut off
        self.asked: list[Asked] = []

    async def get_response(
        self, prompt: Sequence[Any], model: str, sampling_args: Any, tools: Sequence[Any] | None = None, **_: Any
    ) -> Any:
        turn = len(self.asked)
        self.asked.append(([_message(message) for message in prompt], [_tool(tool) for tool in tools or ()]))
        if turn >= len(self.answers):
            raise self.library.OverlongPromptError("no answer is left to repeat")
        cut_off = self.cut_off and turn == len(self.answers) - 1
        text, calls = chat_template.split_calls(self.answers[turn]) if tools else (self.answers[turn], [])
        called = [
            self.library.ToolCall(id=f"call-{turn}-{i}", name=name, arguments=arguments)
            for i, (name, arguments) in enumerate(calls)
        ]
        message = self.library.ResponseMessage(
            content=text,
            tool_calls=called or None,
            finish_reason="length" if cut_off else "tool_calls" if called else "stop",
            is_truncated=cut_off,
        )
        return self.library.Response(id=f"turn-{turn}", created=0, model=model, message=message)


def _message(message: Any) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role, "content": _text(message.content)}
    if calls := getattr(message, "tool_calls", None):
        plain["tool_calls"] = [
            {"id": c.id, "type": "function", "function": {"name": c.name, "arguments": _arguments(c.arguments)}}
            for c in calls
        ]
    for field in ("tool_call_id", "reasoning_content"):
        if value := getattr(message, field, None):
            plain[field] = value
    return plain


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, Mapping) else part.model_dump() for part in content]
    if foreign := [part for part in parts if part.get("type") != "text"]:
        raise DataError(f"a message contains {foreign[0].get('type')!r}, but a policy reads only text")
    return "".join(part["text"] for part in parts)


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _tool(tool: Any) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": function}
