"""The grader of Minerva's evaluations, as VinePPO uses it: finds an answer wherever one may stand, compares generously.

Generosity has a price: 50 counts for 50%, for 0.5 and for 5000, (1, 2) for [1, 2], and 0 for all below a thousandth.
"""

import re
from fractions import Fraction

from tba.grading.helper import equal
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
    without_thousands,
)

_SENTENCE = re.compile(r"final answer is \$(.*?)\$\. I hope", re.DOTALL)
_PRINTED = re.compile(r"```output\n(.*?)```", re.DOTALL)
_LAST_NUMBER = re.compile(r"-?\d*\.?\d+")
_AND = re.compile(r"\\text\{ *and *\}|(?<![a-zA-Z\\])and(?![a-zA-Z])")
_ROWS = re.compile(r"\\begin\{[pbvB]?matrix\}(.*)\\end\{[pbvB]?matrix\}", re.DOTALL)
_CLOSE, _CLOSE_SHARE = Fraction(1, 1000), Fraction(1, 10_000)


def is_right(response: str, gold: str) -> bool:
    """Every answer that was found stands for one of the gold's, and none of those is left."""
    golds = answers_in(gold)
    found = [part for text in dict.fromkeys(extract(response)) for part in (answers_in(text) if golds[1:] else [text])]
    found = [normalised(text) for text in found]
    return _match(found, [normalised(text) for text in golds])


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
    parts = _AND.split(text)
    if parts[1:] or any(bracket in text for bracket in "()[]"):
        return [part.strip(" ,") for part in parts]
    return split_at_commas(without_thousands(re.sub(r", *\\! *", "", text)))


def normalised(text: str) -> str:
    """Without spaces, units and marks of money, percent and degrees; one spelling of what is left."""
    text = degrees_away(plain_brackets(text.replace("\\!", ""))).strip()
    amount = re.sub(r"\\(?:text|mbox)\{[^{}]*\}(?:\^\{?\d+\}?)?$", "", text).strip()
    text = re.sub(r"\\(?:text|mbox|textbf|mathrm)\{([^{}]*)\}", r"\1", amount or text)
    text = re.sub(r"\\?[$%]", "", text)
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
    ours, theirs = decimal(given), decimal(gold)
    if ours is not None and theirs is not None:
        shifted = (theirs * 100, theirs / 100)
        return abs(ours - theirs) < _CLOSE or any(abs(ours - it) <= _CLOSE_SHARE * abs(it) for it in shifted)
    if given.lower() == gold.lower():
        return True
    ours, theirs = rational(given), rational(gold)
    if ours is not None and theirs is not None:
        return ours == theirs
    our_cells, their_cells = _cells(given), _cells(gold)
    if our_cells and their_cells:
        return _all_same(our_cells, their_cells)
    return _same_equation(given, gold)


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
        return any(equal(f"({ours[0]})-({ours[1]})", other) for other in (difference, reverse))
    if len(ours) == 2 and len(ours[0]) <= 2 and len(theirs) == 1:
        return _same(ours[1], gold)
    if len(theirs) == 2 and len(theirs[0]) <= 2 and len(ours) == 1:
        return _same(given, theirs[1])
    return equal(given, gold)
