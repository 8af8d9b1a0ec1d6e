"""The grader of Minerva's evaluations, as VinePPO uses it: finds an answer wherever one may stand, compares generously.

Generosity has a price: 50 counts for 50%, for 0.5 and for 5000, (1, 2) for [1, 2], and 0 for all below a tenth.
"""

import re
from fractions import Fraction

from tba.grading.helper import close
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
    """Every answer that was found stands for one of the gold's, and none of those is left."""
    golds, found = answers_in(gold), extract(response)
    if golds[1:]:
        found = [part for text in dict.fromkeys(found) for part in answers_in(text)]
        return _match([normalised(part) for part in found], [normalised(part) for part in golds])
    return _match(list(dict.fromkeys(normalised(text) for text in found)), [normalised(gold)])  # boxes may agree


def extract(response: str) -> list[str]:
    """The answers of a response, in the first of the ways in which it gives any."""
    if sentence := _SENTENCE.search(response):
        found = [sentence[1]]
    elif "\\boxed" in response or "\\fbox" in response:
        found = all_boxes(response)
    elif "he answer is" in response:
        found = [response.rpartition("he answer is")[2]]
    elif printed := _PRINTED.findall(response):
        found = [printed[-1]]
    else:
        found = _LAST_NUMBER.findall(response.replace(",", ""))[-1:]
    lines = (text.strip().partition("\n")[0].lstrip(":").rstrip("./").strip() for text in found)
    return [line for line in lines if line and len(line) <= LONGEST]


def answers_in(text: str) -> list[str]:
    """A list at its "and", or at its commas if it has no brackets; a comma between thousands is none."""
    text = unwrapped(text.strip())
    parts = _AND.split(text)
    if parts[1:] or any(bracket in text for bracket in "()[]"):
        return [part.strip(" ,") for part in parts]
    return split_at_commas(without_thousands(re.sub(r", *\\! *", "", text)))


def normalised(text: str) -> str:
    """Without spaces, units and marks of money and degrees; one spelling of what is left."""
    text = degrees_away(plain_brackets(unwrapped(text.replace("\\!", "").strip())))
    amount = re.sub(r"\\(?:text|mbox)\{[^{}]*\}(?:\^\{?\d+\}?)?$", "", text).strip()
    text = re.sub(r"\\(?:text|mbox|textbf|mathrm)\{([^{}]*)\}", r"\1", amount or text)
    text = re.sub(r"\\?\$", "", text).replace("\\%", "%")
    text = re.sub(r"(?<![a-zA-Z\\])inf(?:inity)?(?![a-zA-Z])", r"\\infty", text)
    text = text.replace("j", "i") if "i" not in text else text
    text = re.sub(r"^[a-zA-Z] *\\in(?![a-zA-Z])", "", text)
    text = re.sub(r"(\d)\.0+(?!\d)", r"\1", re.sub(r"(?<!\d)\.(?=\d)", "0.", text))
    return braced(text.replace(" ", ""))


def _match(found: list[str], golds: list[str]) -> bool:
    """One to one, in any order."""
    left = list(found)
    for gold in golds:
        match = next((given for given in left if _same(given, gold)), None)
        if match is None:
            return False
        left.remove(match)
    return not left


def _same(given: str, gold: str) -> bool:
    ours, theirs = _number(given), _number(gold)
    if ours is not None and theirs is not None:
        return any(abs(ours - it) <= _CLOSE for it in (theirs, theirs * 100, theirs / 100))
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
    """Digits, with or without a percent sign."""
    number = decimal(text.removesuffix("%"))
    return number / 100 if number is not None and text.endswith("%") else number


def _cells(text: str) -> list[list[str]] | None:
    """Of a matrix, or of what brackets or a union hold: one row."""
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
    """Equations are the same if their sides differ by the same; "x = 5" is as good as 5."""
    ours, theirs = given.split("="), gold.split("=")
    if len(ours) == len(theirs) == 2:
        difference, reverse = f"({theirs[0]})-({theirs[1]})", f"({theirs[1]})-({theirs[0]})"
        return any(close(f"({ours[0]})-({ours[1]})", other) for other in (difference, reverse))
    if len(ours) == 2 and len(ours[0]) <= 2 and len(theirs) == 1:
        return _same(ours[1], gold)
    if len(theirs) == 2 and len(theirs[0]) <= 2 and len(ours) == 1:
        return _same(given, theirs[1])
    return close(given, gold)
