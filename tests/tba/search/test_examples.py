"""The texts of the examples that an evaluation stores."""

from dataclasses import replace

import pytest

from tba.search.examples import example
from tba.types import Response, Reward, Version
from tests.support.builders import make_prompt

V0 = Version(0, 1)
RESPONSE = Response(
    tokens=(5, 1), logps=(-0.5, -0.1), text="3", finished=True, temperature=0.0, top_p=1.0, seed=0, version_start=V0,
    version_end=V0, generate_seconds=0.0,
)  # fmt: skip


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        (("7", "Wrong.\n", "8", "Right."), "7\nWrong.\n8\nRight."),
        (("7", "\nuser\nWrong.\nassistant\n", "8"), "7\nuser\nWrong.\nassistant\n8"),
        (("", "Nothing?"), "Nothing?"),
    ],
)
def test_each_turn_of_a_response_begins_on_a_line_of_its_own(turns: tuple[str, ...], text: str):
    response = replace(RESPONSE, text="".join(turns), turns=turns)
    assert example(V0, 0, make_prompt(), response, Reward(value=1.0)).response == text


def test_a_long_text_keeps_its_beginning_and_its_end():
    words = "".join(f"{n:06} " for n in range(1000))
    prompt = make_prompt(text=words[:4000], answer=words)
    kept = example(V0, 0, prompt, replace(RESPONSE, text=words), Reward(value=1.0))
    assert kept.prompt == words[:4000]
    for text in (kept.response, kept.answer):
        assert text == f"{words[:2000]}\n… 3,000 characters are left out here …\n{words[-2000:]}"
