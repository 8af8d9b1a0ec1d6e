"""Makes the examples that an evaluation stores: responses that people read to compare versions."""

from tba.types import Example, Prompt, Response, Reward, Version

MOST_CHARACTERS = 4_000
"""Maximum length of each text of an example, without the mark where its middle was left out."""


def example(version: Version, step: int, prompt: Prompt, response: Response, reward: Reward) -> Example:
    return Example(
        version=version,
        step=step,
        prompt_id=prompt.prompt_id,
        prompt=shortened(prompt.text),
        response=shortened(_readable(response)),
        answer=shortened(prompt.answer),
        reward=float(reward.value),
    )


def shortened(text: str) -> str:
    """Return a text of at most MOST_CHARACTERS characters, and of a longer text its beginning and its end with a mark
    between them: a long prompt often ends with its question, and a long response with its answer."""
    left_out = len(text) - MOST_CHARACTERS
    if left_out <= 0:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n… {left_out:,} characters are left out here …\n{text[-half:]}"


def _readable(response: Response) -> str:
    """Return the text of a response, in which each turn begins on a line of its own."""
    if not response.turns:
        return response.text
    text, *others = response.turns
    for turn in others:
        is_apart = not text or text.endswith("\n") or turn.startswith("\n")
        text += turn if is_apart else f"\n{turn}"
    return text
