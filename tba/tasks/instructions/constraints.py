"""The constraints of our prompts: their kinds, which kinds contradict each other, and how a constraint is drawn and
worded. The names of kinds and of arguments are those of IFEval, whose checkers decide whether a constraint holds.

Kinds of IFEval that are missing here: `number_sentences` and `capital_word_frequency`, because their checkers need data
that has to be downloaded; `response_language`, because small models speak one language; and `constrained_response`,
because its three answers fit no request of ours.
"""

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, NamedTuple

from tba.tasks.instructions import topics

MOST_TOGETHER = 4
"""Largest number of constraints of one prompt."""


class Constraint(NamedTuple):
    kind: str
    arguments: Mapping[str, Any]


class Draw(NamedTuple):
    """The random numbers and the limits from which a constraint is drawn."""

    rng: Random
    split: str
    request: str
    words: int  # the largest number of words that a constraint may ask for

    def word(self, pool: tuple[str, ...]) -> str:
        return self.rng.choice(topics.part(self.split, pool))

    def several(self, pool: tuple[str, ...], least: int, most: int) -> list[str]:
        return self.rng.sample(topics.part(self.split, pool), self.rng.randint(least, most))


Worded = tuple[dict[str, Any], str]
"""The arguments of a constraint, and the sentence that states it."""


def _existence(draw: Draw) -> Worded:
    words = draw.several(topics.KEYWORDS, 1, 2)
    return {"keywords": words}, f"Include the word{'s' * (len(words) > 1)} {_listed(words)}."


def _frequency(draw: Draw) -> Worded:
    word, times = draw.word(topics.KEYWORDS), draw.rng.randint(2, 3)
    arguments = {"keyword": word, "frequency": times, "relation": "at least"}
    return arguments, f'Use the word "{word}" at least {times} times.'


def _forbidden_words(draw: Draw) -> Worded:
    words = draw.several(topics.AVOIDED, 2, 4)
    return {"forbidden_words": words}, f"Do not use the words {_listed(words)}."


def _letter_frequency(draw: Draw) -> Worded:
    letter, times = draw.word(topics.LETTERS), draw.rng.randint(3, 6)
    arguments = {"letter": letter, "let_frequency": times, "let_relation": "at least"}
    return arguments, f'The letter "{letter}" should appear at least {times} times.'


def _number_words(draw: Draw) -> Worded:
    relation = draw.rng.choice(("at least", "less than"))
    number = draw.rng.randint(draw.words // 2, draw.words)
    stated = f"at least {number}" if relation == "at least" else f"fewer than {number}"
    return {"num_words": number, "relation": relation}, f"Answer with {stated} words."


def _number_paragraphs(draw: Draw) -> Worded:
    number = draw.rng.randint(2, 3)
    return {
        "num_paragraphs": number
    }, f"Write {number} paragraphs and separate them with the markdown divider *** on a line of its own."


def _first_word(draw: Draw) -> Worded:
    word, paragraphs = draw.word(topics.FIRST_WORDS), draw.rng.randint(1, 2)
    nth = draw.rng.randint(1, paragraphs)
    arguments = {"num_paragraphs": paragraphs, "nth_paragraph": nth, "first_word": word}
    if paragraphs == 1:
        return arguments, f'Write a single paragraph that starts with the word "{word}".'
    which = ("first", "second")[nth - 1]
    return arguments, (
        f'Write exactly two paragraphs with a blank line between them. The {which} one starts with the word "{word}".'
    )


def _placeholders(draw: Draw) -> Worded:
    number, example = draw.rng.randint(1, 2), draw.rng.choice(topics.PLACEHOLDERS)
    stated = f"Use at least {number} placeholder{'s' * (number > 1)} in square brackets, such as [{example}]."
    return {"num_placeholders": number}, stated


def _postscript(draw: Draw) -> Worded:
    marker = draw.rng.choice(("P.S.", "P.P.S"))
    return {"postscript_marker": marker}, f"At the end, add a postscript that starts with {marker}"


def _bullets(draw: Draw) -> Worded:
    number = draw.rng.randint(2, 3)
    return {"num_bullets": number}, f"Use exactly {number} bullet points in markdown, such as:\n* This is a point."


def _highlights(draw: Draw) -> Worded:
    number = draw.rng.randint(1, 2)
    stated = f"Highlight at least {number} part{'s' * (number > 1)} with asterisks, such as *highlighted part*."
    return {"num_highlights": number}, stated


def _sections(draw: Draw) -> Worded:
    number, name = draw.rng.randint(2, 3), draw.rng.choice(("Section", "SECTION"))
    stated = f"Divide it into {number} sections that begin with {name} 1, {name} 2, and so on."
    return {"section_spliter": name, "num_sections": number}, stated


def _json(draw: Draw) -> Worded:
    return {}, 'The entire output must be in JSON format, such as {"answer": "text"}.'


def _title(draw: Draw) -> Worded:
    return {}, "Give it a title in double angular brackets, such as <<a title>>."


def _two_responses(draw: Draw) -> Worded:
    return {}, "Give two different responses with 6 asterisks between them, such as: One. ****** Another."


def _repeat_prompt(draw: Draw) -> Worded:
    stated = f'First repeat the request word for word ("{draw.request}"), then give your answer.'
    return {"prompt_to_repeat": draw.request}, stated


def _last_phrase(draw: Draw) -> Worded:
    phrase = draw.word(topics.LAST_PHRASES)
    return {"end_phrase": phrase}, f'Finish with this exact phrase: "{phrase}" No other words follow it.'


def _capital(draw: Draw) -> Worded:
    return {}, "WRITE THE ENTIRE RESPONSE IN ENGLISH AND IN ALL CAPITAL LETTERS."


def _lowercase(draw: Draw) -> Worded:
    return {}, "write the entire response in english and in all lowercase letters, without any capital letter."


def _no_comma(draw: Draw) -> Worded:
    return {}, "Do not use any commas."


def _quotation(draw: Draw) -> Worded:
    return {}, 'Wrap the entire response in double quotation marks, such as "This is a response."'


def _listed(words: list[str]) -> str:
    quoted = [f'"{word}"' for word in words]
    return " and ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted)


KINDS: dict[str, Callable[[Draw], Worded]] = {
    "keywords:existence": _existence,
    "keywords:frequency": _frequency,
    "keywords:forbidden_words": _forbidden_words,
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:number_words": _number_words,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "detectable_content:number_placeholders": _placeholders,
    "detectable_content:postscript": _postscript,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:json_format": _json,
    "detectable_format:title": _title,
    "combination:two_responses": _two_responses,
    "combination:repeat_prompt": _repeat_prompt,
    "startend:end_checker": _last_phrase,
    "startend:quotation": _quotation,
    "change_case:english_capital": _capital,
    "change_case:english_lowercase": _lowercase,
    "punctuation:no_comma": _no_comma,
}
"""The kinds of constraints, and how each is drawn and worded."""

_ALONE = {
    "detectable_format:json_format": {"keywords:existence", "keywords:forbidden_words"},
    "combination:two_responses": {
        "keywords:existence", "keywords:forbidden_words", "detectable_format:title", "punctuation:no_comma",
    },
    "combination:repeat_prompt": {"keywords:existence", "detectable_format:title", "punctuation:no_comma"},
}  # fmt: skip
"""Kinds that go together only with the kinds given here, as in IFEval."""

_PARTS = {
    "length_constraints:number_paragraphs", "length_constraints:nth_paragraph_first_word",
    "detectable_format:number_bullet_lists", "detectable_format:multiple_sections",
}  # fmt: skip
"""Kinds that say how a response is divided into parts. A prompt has at most one of them."""

_CONTRADICTIONS = {
    "change_case:english_capital": {
        "change_case:english_lowercase", "detectable_format:multiple_sections", "startend:end_checker",
        "length_constraints:number_words",  # words in capital letters have many tokens
    },
    "change_case:english_lowercase": {
        "detectable_format:multiple_sections", "detectable_content:postscript", "startend:end_checker",
    },
    "startend:end_checker": {"detectable_content:postscript"},
    "startend:quotation": {"detectable_format:title", "detectable_format:number_bullet_lists"},
    "length_constraints:nth_paragraph_first_word": {"detectable_content:postscript", "detectable_format:title"},
    "detectable_format:number_highlighted_sections": {  # whose marks are asterisks, too
        "detectable_format:number_bullet_lists", "length_constraints:number_paragraphs",
        "detectable_format:multiple_sections",  # as in IFEval
    },
}  # fmt: skip


def go_together(one: str, other: str) -> bool:
    """Return True if a response can keep constraints of both kinds, and both can be meant."""
    if one == other or {one, other} <= _PARTS:
        return False
    return not _excludes(one, other) and not _excludes(other, one)


def _excludes(kind: str, other: str) -> bool:
    return other in _CONTRADICTIONS.get(kind, ()) or other not in _ALONE.get(kind, {other})
