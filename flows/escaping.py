"""Texts that a model may have written, or a stranger, as HTML, or a line of a terminal, that shows them and does
nothing else."""

import unicodedata
from html import escape

_MOST_CHARACTERS = 20_000


def shown(text: str, most: int = _MOST_CHARACTERS) -> str:
    """A text as it is, where nothing in it is markup; what would be invisible, or turn what follows around, by name."""
    left_out = len(text) - most
    told = "".join(map(_character, text[:most]))
    return told if left_out <= 0 else f"{told}… <span class='faint'>({left_out:,} characters more)</span>"


def line(text: str, most: int = 160) -> str:
    """Its beginning, in one line."""
    flat = " ".join(text.split())
    return "".join(map(_character, flat[:most])) + ("…" if len(flat) > most else "")


def plain(text: str) -> str:
    """A text for a terminal, in one line, where nothing in it commands the terminal."""
    return "".join(it if it.isprintable() else " " if it.isspace() else "\N{REPLACEMENT CHARACTER}" for it in text)


def _character(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return escape(character)
    if character in "\u200d\u200c":  # inside of emoji and words
        return character
    return f"<span class='odd'>U+{ord(character):04X}</span>"
