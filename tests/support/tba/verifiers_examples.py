"""Environments of verifiers, and their tokenizer."""

from typing import Any

from benchmarks.harness.tiny_models import tiny_tokenizer
from tba.types import Response, Version

CHARACTERS = "01?QAR:Tflip \nbye"
CALLS = [f'<tool_call>{{"name": "flip", "arguments": {{"bits": "{bits}"}}}}</tool_call>' for bits in ("0", "10")]
TEMPLATE = (
    "{% if tools %}T:{% for tool in tools %}{{ tool.function.name }} {% endfor %}{{ '\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'assistant' %}A:{{ message.content }}{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}{{ eos_token }}\n"
    "{% elif message.role == 'tool' %}R:{{ message.content }}\n"
    "{% else %}Q:{{ message.content }}\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A:{% endif %}"
)


def calling_tokenizer(template: str | None = TEMPLATE) -> Any:
    """Of single characters, with a token for each of two calls of a tool."""
    tokenizer = tiny_tokenizer(CHARACTERS)
    tokenizer.add_tokens(CALLS)
    tokenizer.chat_template = template
    return tokenizer


def response_of(*turns: str, finished: bool = True) -> Response:
    return Response(
        tokens=(5,), logps=(-1.0,), text="".join(turns), finished=finished, temperature=1.0, top_p=1.0, seed=0,
        version_start=Version(0, 1), version_end=Version(0, 1), generate_seconds=0.1, turns=turns,
    )  # fmt: skip
