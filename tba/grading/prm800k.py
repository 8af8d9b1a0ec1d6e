"""The comparison published with PRM800K. Answers are compared as texts first, then element by element, with algebra if
it is cheap.

Fractions must be reduced. If the gold answer is a whole number, the answer must be written as a whole number: an
expression with the same value counts as unfinished work.
"""

import re

from tba.grading.algebra_process import equal
from tba.grading.latex import (
    braced,
    degrees_away,
    hendrycks,
    inside_brackets,
    plain_brackets,
    rational,
    split_at_commas,
    without_thousands,
)

_UNITS = "centimeter cm meter mile inch foot feet yard second minute hour day week month year degree".replace(" ", "|")
_UNIT = re.compile(rf"(?<![a-zA-Z\\])(?:{_UNITS})(?:es|s)?(?![a-zA-Z]) *(?:\^ *\{{?\d+\}}?)?", re.IGNORECASE)
_POWERS = {"million": 6, "billion": 9, "trillion": 12}
_COMMAND = re.compile(r"\\(?:[a-zA-Z]+|[^a-zA-Z])")
_TYPED = {
    "\\cdot": "*", "\\times": "*", "\\div": "/", "\\pi": " pi ", "\\infty": "inf", "\\cup": "U",
    "\\{": "(", "\\}": ")", "\\,": " ", "\\;": " ", "\\ ": " ", "\\\\": ";",
}  # fmt: skip
_FRACTION = re.compile(r"\\frac *\{([^{}]*)\} *\{([^{}]*)\}")
_ROOT = re.compile(r"\\sqrt *(\[[^\[\]]*\])? *\{([^{}]*)\}")
_EXPONENT = re.compile(r"\^ *\{([^{}]*)\}")
_WHOLE, _PROPER = re.compile(r"-?\d+"), re.compile(r"-?\d+/0*[1-9]\d*")
_KNOWN = re.compile(r"sqrt|pi|inf|(?:arc)?(?:sin|cos|tan|cot|sec|csc)|log|ln")
_COSTLY = re.compile(r"\^\(|\^-?\d+\^|\^-?\d\d|!")


def is_right(given: str, gold: str) -> bool:
    if hendrycks(given) == hendrycks(gold) != "":
        return True
    given, gold = plain(given), plain(gold)
    ours, theirs = _elements(given), _elements(gold)
    if not given or len(ours) != len(theirs):
        return False
    if len(theirs) > 1 and (given[0], given[-1]) != (gold[0], gold[-1]):  # an open interval is not a closed one
        return False
    return all(_same(our, their) for our, their in zip(ours, theirs, strict=True))


def plain(answer: str) -> str:
    """Return an answer in lower case without units, LaTeX or spaces. Fractions and roots are written as plain text."""
    text = re.sub(r"\\(?:text|mbox|mathrm|textbf)\{([^{}]*)\}", r" \1 ", plain_brackets(answer))
    text = re.sub(r"\\?[%$]", "", degrees_away(text))
    text = re.sub(r" +(?:or|and) +", ", ", text)
    text = re.sub(r" *(million|billion|trillion)\b", lambda match: f"*10^{_POWERS[match[1]]}", text)
    text = braced(re.sub(r", *\\! *|\\!", "", _UNIT.sub("", text)))
    text = _typed(_COMMAND.sub(lambda match: _TYPED.get(match[0], match[0]), text))
    text = re.sub(r"(\d+) +(\d+/\d+)", r"(\1+\2)", text.strip())  # a mixed number
    text = re.sub(r"[\s{}\\]", "", text).lower()
    text = text if re.search(r"[()\[\]]", text) else without_thousands(text)
    return re.sub(r"^(-?\d+)\.0*$", r"\1", text)


def _typed(text: str) -> str:
    """Rewrite roots, exponents and fractions as plain text, beginning with the innermost."""
    before = ""
    while text != before:
        before = text
        text = _ROOT.sub(lambda match: f"sqrt{match[1] or ''}({match[2]})", text)
        text = _EXPONENT.sub(lambda match: "^" + _grouped(match[1], r"-?\d+|[a-zA-Z]"), text)
        text = _FRACTION.sub(lambda match: f" {_grouped(match[1], r'-?[0-9.]+|[a-z]')}/{_grouped(match[2])}", text)
    return text


def _grouped(text: str, alone: str = r"[0-9.]+|[a-z]") -> str:
    """Put brackets around a text, unless it matches `alone` and so needs no brackets."""
    return text.strip() if re.fullmatch(alone, text.strip()) else f"({text})"


def _elements(text: str) -> list[str]:
    inside = inside_brackets(text)
    return [text] if inside is None else split_at_commas(inside)


def _same(given: str, gold: str) -> bool:
    if given == gold:
        return True
    if _WHOLE.fullmatch(gold) or (_PROPER.fullmatch(given) and _PROPER.fullmatch(gold)):
        return False
    ours, theirs = rational(given), rational(gold)
    if ours is not None and theirs is not None:
        return ours == theirs
    return _is_cheap(given) and _is_cheap(gold) and equal(given, gold)


def _is_cheap(text: str) -> bool:
    unknown = {character for character in _KNOWN.sub("", text) if character.isalpha()}
    return len(unknown) <= 2 and not _COSTLY.search(text)
