"""The grader of Minerva's evaluations, as VinePPO uses it. It finds an answer in many forms, and compares generously.

It therefore also accepts wrong answers: 50 if the gold answer is 50%, 0.5 or 5000; (1, 2) if it is [1, 2]; and 0 if it
is at most 0.1.
"""

import re
from fractions import Fraction

from tba.grading.algebra_process import close
from tba.grading.latex import (
    LONGEST,
    all_boxes,
    braced,
    decimal,
    degrees_away,
    inside_brackets,
    plain_brackets,
    rational,
    split_at_commas,
    unwrapped,
    without_thousands,
)

_SENTENCE = re.compile(r"final answer is \$(.*?)\$\. I hope", re.DOTALL)
_PRINTED = re.compile(r"```output\n(.*?)```", re.DOTALL)
_LAST_NUMBER = re.compile(r"-?\d*\.?\d+")
_AND = re.compile(r"\\text\{ *and *\}|(?<![a-zA-Z\\])and(?![a-zA-Z])")
_ROWS = re.compile(r"\\begin\{[pbvB]?matrix\}(.*)\\end\{[pbvB]?matrix\}", re.DOTALL)
_CLOSE = Fraction(1, 1000)


def is_right(response: str, gold: str) -> bool:
    """True if the answers in a response match the gold answers one to one."""
    golds, answers = answers_in(gold), extract(response)
    if golds[1:]:
        answers = [part for text in dict.fromkeys(answers) for part in answers_in(text)]
        return _match([normalised(part) for part in answers], [normalised(part) for part in golds])
    # Several boxes with the same answer count once.
    return _match(list(dict.fromkeys(normalised(text) for text in answers)), [normalised(gold)])


def extract(response: str) -> list[str]:
    """Return the answers in a response. They are read from the first of the known forms that occurs in the response."""
    if sentence := _SENTENCE.search(response):
        answers = [sentence[1]]
    elif "\\boxed" in response or "\\fbox" in response:
        answers = all_boxes(response)
    elif "he answer is" in response:
        answers = [response.rpartition("he answer is")[2]]
    elif printed := _PRINTED.findall(response):
        answers = [printed[-1]]
    else:
        answers = _LAST_NUMBER.findall(response.replace(",", ""))[-1:]
    lines = (text.strip().partition("\n")[0].lstrip(":").rstrip("./").strip() for text in answers)
    return [line for line in lines if line and len(line) <= LONGEST]


def answers_in(text: str) -> list[str]:
    """Split a list at each "and", or else, if it has no brackets, at commas that do not separate thousands."""
    text = unwrapped(text.strip())
    parts = _AND.split(text)
    if parts[1:] or any(bracket in text for bracket in "()[]"):
        return [part.strip(" ,") for part in parts]
    return split_at_commas(without_thousands(re.sub(r", *\\! *", "", text)))


def normalised(text: str) -> str:
    """Remove spaces, units, dollar signs and degree signs, and rewrite the rest in a uniform spelling."""
    text = degrees_away(plain_brackets(unwrapped(text.replace("\\!", "").strip())))
    amount = re.sub(r"\\(?:text|mbox)\{[^{}]*\}(?:\^\{?\d+\}?)?$", "", text).strip()
    text = re.sub(r"\\(?:text|mbox|textbf|mathrm)\{([^{}]*)\}", r"\1", amount or text)
    text = re.sub(r"\\?\$", "", text).replace("\\%", "%")
    text = re.sub(r"(?<![a-zA-Z\\])inf(?:inity)?(?![a-zA-Z])", r"\\infty", text)
    text = text.replace("j", "i") if "i" not in text else text
    text = re.sub(r"^[a-zA-Z] *\\in(?![a-zA-Z])", "", text)
    text = re.sub(r"(\d)\.0+(?!\d)", r"\1", re.sub(r"(?<!\d)\.(?=\d)", "0.", text))
    return braced(text.replace(" ", ""))


def _match(answers: list[str], golds: list[str]) -> bool:
    """True if answers and gold answers match one to one, in any order."""
    left = list(answers)
    for gold in golds:
        match = next((answer for answer in left if _same(answer, gold)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _same(given: str, gold: str) -> bool:
    ours, theirs = _number(given), _number(gold)
    if ours is not None and theirs is not None:
        return any(abs(ours - value) <= _CLOSE for value in (theirs, theirs * 100, theirs / 100))
    ours, theirs = rational(given), rational(gold)
    if ours is not None and theirs is not None:
        return abs(ours - theirs) <= _CLOSE
    if given.lower() == gold.lower():
        return True
    our_cells, their_cells = _cells(given), _cells(gold)
    if our_cells and their_cells:
        return _all_same(our_cells, their_cells)
    return _same_equation(given, gold)


def _number(text: str) -> Fraction | None:
    """Return the value of a decimal number, with or without a percent sign; None for any other text."""
    number = decimal(text.removesuffix("%"))
    return number / 100 if number is not None and text.endswith("%") else number


def _cells(text: str) -> list[list[str]] | None:
    """Return the rows of a matrix. For a text in brackets, or a union, return a single row with its elements or parts.
    Return None for any other text."""
    if "\\cup" in text:
        return [text.split("\\cup")]
    if rows := _ROWS.fullmatch(text):
        return [row.split("&") for row in rows[1].split("\\\\")]
    inside = inside_brackets(text)
    return None if inside is None else [split_at_commas(inside)]


def _all_same(ours: list[list[str]], theirs: list[list[str]]) -> bool:
    return [len(row) for row in ours] == [len(row) for row in theirs] and all(
        _same(our, their)
        for our_row, their_row in zip(ours, theirs, strict=True)
        for our, their in zip(our_row, their_row, strict=True)
    )


def _same_equation(given: str, gold: str) -> bool:
    """True if two equations are equal after each is written as left side minus right side, up to the sign. "x = 5" also
    equals 5."""
    ours, theirs = given.split("="), gold.split("=")
    if len(ours) == len(theirs) == 2:
        difference, reverse = f"({theirs[0]})-({theirs[1]})", f"({theirs[1]})-({theirs[0]})"
        return any(close(f"({ours[0]})-({ours[1]})", other) for other in (difference, reverse))
    if len(ours) == 2 and len(ours[0]) <= 2 and len(theirs) == 1:
        return _same(ours[1], gold)
    if len(theirs) == 2 and len(theirs[0]) <= 2 and len(ours) == 1:
        return _same(given, theirs[1])
    return close(given, gold)
