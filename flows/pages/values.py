"""How pages write numbers, times and texts, and how they colour values above or below a reference value."""

import math
import re
from datetime import datetime
from typing import Any

from markupsafe import Markup

from flows.escaping import line

SHADES = 10  # of colour for a value above or below its reference value; style.css has a class for each
_MOST_CHARACTERS = 300  # of a text in a sentence, a tile or a table


def number(value: float) -> str:
    """Return a finite number as a short text with about three significant digits."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e5 or size < 1e-3:
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    digits = max(0, 2 - math.floor(math.log10(size)))
    text = f"{value:.{min(digits, 4)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def written(value: Any) -> str:
    """Return any value as a page writes it in a sentence, a tile or a table."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return number(value).replace("-", "−") if math.isfinite(value) else str(value)
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M:%S}"
    return value if isinstance(value, Markup) else line(str(value), _MOST_CHARACTERS)


def signed(value: float | None) -> str:
    """Return a number with its sign, even if the number is positive."""
    return f"{'+' if value is not None and value > 0 else ''}{written(value)}"


def direction(value: float) -> str:
    """Return the style sheet class that colours a number above, below or at 0."""
    return "up" if value > 0 else "down" if value < 0 else "faint"


def shade(value: float | None, most: float) -> str:
    """Return the class whose colour shows how far a value is from 0: `most` has the full colour. Empty text near 0."""
    if value is None or value != value or most <= 0:
        return ""
    strength = min(SHADES, round(SHADES * abs(value) / most))
    return f"{'p' if value > 0 else 'm'}{strength}" if strength else ""


def shade_between(value: float | None, low: float, high: float) -> str:
    """Return the class whose colour shows where a value lies from `low` to `high`. Empty text in the middle."""
    if value is None or not high > low:
        return ""
    return shade(2 * (value - low) / (high - low) - 1, 1.0)


def anchor(title: str) -> str:
    """Return the fragment of an address that leads to a heading."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")
