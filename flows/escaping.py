"""Show untrusted texts, such as a model's responses, as HTML or in a terminal. Markup and control characters in them
have no effect."""

import unicodedata

from markupsafe import Markup, escape

_MOST_CHARACTERS = 20_000
_INVISIBLE = ("Cc", "Cf", "Cs", "Zl", "Zp")  # Unicode categories
_JOINERS = "\u200d\u200c"  # invisible, but a normal part of emoji and words


def shown(text: str, most: int = _MOST_CHARACTERS) -> Markup:
    """Return a text as HTML that shows it literally. Characters that are invisible or change the writing direction are
    shown by their code. Only the first `most` characters are shown."""
    left_out = len(text) - most
    html = _visible(text[:most])
    return html if left_out <= 0 else html + Markup(f"… <span class='faint'>({left_out:,} characters more)</span>")


def line(text: str, most: int = 160) -> Markup:
    """Return the first `most` characters of a text as HTML in one line."""
    flat = " ".join(text.split())
    return _visible(flat[:most]) + ("…" if len(flat) > most else "")


def plain(text: str) -> str:
    """Return a text as one line for a terminal. Unprintable characters become spaces or replacement characters."""
    return "".join(it if it.isprintable() else " " if it.isspace() else "\N{REPLACEMENT CHARACTER}" for it in text)


def _visible(text: str) -> Markup:
    if text.replace("\n", "").replace("\t", "").isprintable():
        return escape(text)
    return Markup("").join(map(_character, text))


def _character(character: str) -> Markup | str:
    if character in "\n\t" or unicodedata.category(character) not in _INVISIBLE or character in _JOINERS:
        return character
    return Markup(f"<span class='odd'>U+{ord(character):04X}</span>")
