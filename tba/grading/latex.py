"""Find the answer in a response, and rewrite LaTeX in a uniform spelling. This module works on text only and computes
nothing."""

import re
from fractions import Fraction

LONGEST = 1000  # maximum number of characters of an answer; a longer text is no answer and would only cost time

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z]) *")
_UNBRACED = re.compile(r"[^$\n]*")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)")
_FRACTION = re.compile(r"([+-]?)(?:\\frac\{([+-]?\d+)\}\{(\d+)\}|(\d+)/(\d+))")
_OPENING, _CLOSING = "([{", ")]}"


def after_thinking(response: str) -> str:
    """Return the text after the last closing thinking tag, or the whole response if there is none."""
    return response.rpartition("</think>")[2]


def last_box(text: str) -> str | None:
    """Return the content of the last box (of nested boxes, the innermost). Return None if there is no box or the last
    box was cut off."""
    starts = [match.end() for match in _BOX.finditer(text)]
    return _box(text, starts[-1]) if starts else None


def all_boxes(text: str) -> list[str]:
    """Return the contents of all boxes (of nested boxes, the innermost)."""
    boxes = (_box(text, match.end()) for match in _BOX.finditer(text))
    return [box for box in boxes if box is not None and not _BOX.search(box)]


def _box(text: str, start: int) -> str | None:
    if not text.startswith("{", start):
        return _UNBRACED.match(text[start : start + LONGEST])[0].strip()  # pyright: ignore[reportOptionalSubscript]
    depth = 0
    for at in range(start, min(len(text), start + LONGEST)):
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start + 1 : at].strip()
    return None


def hendrycks(answer: str) -> str:
    """Rewrite an answer in the spelling of the MATH dataset's own grader. This grader accepts an answer if its spelling
    equals that of the gold answer."""
    text = unwrapped(answer.strip().replace("\n", "").replace("\\!", "").replace("\\\\", "\\"))
    text = degrees_away(plain_brackets(text)).replace("\\$", "").replace("\\%", "")
    amount, unit, _ = text.partition("\\text{ ")
    text = amount if unit and amount.strip() else text
    text = re.sub(r"(^|[ {])\.", r"\g<1>0.", text)
    name, equals, value = text.partition("=")
    text = value if equals and len(name.strip()) <= 2 and "=" not in value else text
    text = braced(text.replace(" ", ""))
    if text == "0.5":
        return "\\frac{1}{2}"
    return re.sub(r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}", text)


def unwrapped(text: str) -> str:
    r"""Remove \text{} and braces around the whole text."""
    while text.startswith(("\\text{", "{")):
        inside = inside_brackets(text.removeprefix("\\text"))
        if inside is None:
            break
        text = inside.strip()
    return text


def plain_brackets(text: str) -> str:
    r"""Write all fractions as \frac, and brackets without \left and \right."""
    return re.sub(r"\\(?:left|right)(?![a-zA-Z]) ?", "", re.sub(r"\\[dt]frac", r"\\frac", text))


def degrees_away(text: str) -> str:
    return re.sub(r" *\^ *(?:\\circ|\{ *\\circ *\})", "", text)


def braced(text: str) -> str:
    r"""Add the braces that LaTeX lets one leave out, as in \frac12, \sqrt3 and x_1."""
    text = re.sub(r"_ *([0-9a-zA-Z])", r"_{\1}", text)
    text = re.sub(r"\\sqrt *([0-9a-zA-Z])", r"\\sqrt{\1}", text)
    text = re.sub(r"\\frac *([0-9a-zA-Z]|\\pi)(?= *[0-9a-zA-Z{\\])", r"\\frac{\1}", text)
    return re.sub(r"(\\frac *\{[^{}]*\}) *([0-9a-zA-Z]|\\pi(?![a-zA-Z]))", r"\1{\2}", text)


def without_thousands(text: str) -> str:
    return _THOUSANDS.sub("", text)


def decimal(text: str) -> Fraction | None:
    """Return the value of a decimal number, which may have thousands separators; None for any other text."""
    text = without_thousands(text)
    return Fraction(text) if _NUMBER.fullmatch(text) else None


def rational(text: str) -> Fraction | None:
    """Return the value of a decimal number or of a fraction of two whole numbers; None for any other text."""
    match = _FRACTION.fullmatch(text)
    if not match:
        return decimal(text)
    above, below = int(match[2] or match[4]), int(match[3] or match[5])
    return Fraction(-above if match[1] == "-" else above, below) if below else None


def inside_brackets(text: str) -> str | None:
    """Return the text inside a pair of brackets that encloses the whole text. Return None if there is no such pair."""
    if len(text) < 3 or text[0] not in _OPENING or text[-1] not in _CLOSING:
        return None
    depth = 0
    for at, character in enumerate(text):
        depth += (character in _OPENING) - (character in _CLOSING)
        if depth == 0 and at < len(text) - 1:
            return None
    return text[1:-1]


def split_at_commas(text: str) -> list[str]:
    """Split a text at the commas that are outside all brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]
