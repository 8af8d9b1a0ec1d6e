"""Decide whether two expressions are equal. This module imports sympy and runs only in the helper process.

Expressions are parsed by the grammar below, never by sympy's parser, which evaluates text as Python.
"""

import logging
import re
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, parse, verify

# math_verify would warn that its timeouts are off; the helper has a time limit of its own.
logging.getLogger("math_verify").setLevel(logging.ERROR)

Expression = Any  # an expression of sympy, whose types are incomplete

_SYMBOLS = [
    "alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "zeta", "eta", "theta", "iota", "kappa", "lambda", "mu",
    "nu", "xi", "rho", "sigma", "tau", "phi", "varphi", "chi", "psi", "omega", "ell",
]  # fmt: skip
_FUNCTIONS = {
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec, "csc": sympy.csc,
    "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "sinh": sympy.sinh, "cosh": sympy.cosh,
    "tanh": sympy.tanh, "ln": sympy.log, "log": sympy.log, "exp": sympy.exp,
}  # fmt: skip
_CONSTANTS = {"pi": sympy.pi, "e": sympy.E, "i": sympy.I, "inf": sympy.oo, "infty": sympy.oo}
_MEANS = {
    "\\cdot": "*",
    "\\times": "*",
    "\\div": "/",
    "\\left": "",
    "\\right": "",
    "\\dfrac": "frac",
    "\\tfrac": "frac",
}
_NAMES = sorted([*_FUNCTIONS, *_CONSTANTS, "sqrt", "frac"], key=len, reverse=True)
_COMMANDS = sorted([*_NAMES, *_SYMBOLS, *(command[1:] for command in _MEANS)], key=len, reverse=True)
_TOKEN = re.compile(  # also splits \pir, which remains of "\pi r" when a grader removes spaces
    rf"\d+\.?\d*|\.\d+|\\[,;:! ]|\\(?:{'|'.join(_COMMANDS)})|\\[a-zA-Z]+|{'|'.join(_NAMES)}|\S"
)
_MIXED = re.compile(r"(\d+) frac \{ (\d+) \} \{ (\d+) \}$")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Unreadable(Exception):
    """The text is not an expression of this grammar."""


def equal(given: str, gold: str) -> bool:
    difference = read(given) - read(gold)
    return bool(difference == 0 or sympy.simplify(difference) == 0)


def close(given: str, gold: str) -> bool:
    difference = read(given) - read(gold)
    if difference.is_number:
        return bool(abs(sympy.N(difference)) <= 1e-3)
    return bool(sympy.simplify(difference) == 0)


def verified(given: str, gold: str) -> bool:
    return bool(verify(_parsed(gold), _parsed(given), timeout_seconds=None))


COMPARISONS = {"equal": equal, "close": close, "verified": verified}


def answer(what: str, given: str, gold: str) -> bool:
    compare = COMPARISONS[what]
    try:
        return compare(given, gold)
    except Exception:  # a model may write anything: too deep, too large, not a number
        return False


def _parsed(answer: str) -> list:
    return parse(f"\\boxed{{{answer}}}", [LatexExtractionConfig()], parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def read(text: str) -> Expression:
    return _Reader(text).whole()


class _Reader:
    """A recursive-descent parser. Each method reads the part of an expression that the method is named after."""

    def __init__(self, text: str):
        tokens = (token.strip() for token in _TOKEN.findall(text))
        tokens = (_MEANS.get(token, token.lstrip("\\")) for token in tokens if not re.match(r"\\[,;:! ]?$", token))
        self.tokens = [token for token in tokens if token]
        self.at = 0

    def whole(self) -> Expression:
        value = self.sum()
        if self.next:
            raise Unreadable(self.next)
        return value

    @property
    def next(self) -> str:
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, *tokens: str) -> str:
        """Read the next token if it is one of these, and return it; otherwise return an empty string."""
        token = self.next
        if token not in tokens:
            return ""
        self.at += 1
        return token

    def sum(self) -> Expression:
        value = self.product()
        while sign := self.take("+", "-"):
            value = value + self.product() if sign == "+" else value - self.product()
        return value

    def product(self) -> Expression:
        sign = -1 if self.take("-", "+") == "-" else 1
        value = self.mixed_number() or self.power()
        while True:
            if self.take("*"):
                value = value * self.signed_power()
            elif self.take("/"):
                value = value / self.signed_power()
            elif self.begins_value():
                value = value * self.power()
            else:
                return sign * value

    def mixed_number(self) -> Expression | None:
        """Read a mixed number: a whole number followed by a fraction of two whole numbers."""
        match = _MIXED.match(" ".join(self.tokens[self.at : self.at + 8]))
        if not match:
            return None
        self.at += 8
        whole, above, below = map(int, match.groups())
        return whole + sympy.Rational(above, below)

    def signed_power(self) -> Expression:
        return -self.power() if self.take("-") else self.power()

    def power(self) -> Expression:
        value = self.value()
        return value ** self.signed_power() if self.take("^") else value

    def begins_value(self) -> bool:
        return bool(re.match(r"[0-9.a-zA-Z({\[]", self.next))

    def value(self) -> Expression:
        token = self.next
        self.at += 1
        if token in _CLOSING:
            value = self.sum()
            if not self.take(_CLOSING[token]):
                raise Unreadable(f"{token} is not closed")
            return value
        if re.match(r"[0-9.]", token):
            return sympy.Rational(token)
        if token == "frac":
            above = self.value()
            return above / self.value()
        if token == "sqrt":
            index = self.value() if self.next == "[" else sympy.Integer(2)
            return sympy.root(self.value(), index)
        if token in _FUNCTIONS:
            return self.function(token)
        if token in _CONSTANTS:
            return _CONSTANTS[token]
        if token.isalpha() and (len(token) == 1 or token in _SYMBOLS):
            return sympy.Symbol(token + self.subscript())
        raise Unreadable(token or "the end")

    def function(self, name: str) -> Expression:
        """Read a function and its argument. The argument is the expression in brackets, or, without brackets, the
        product of the letters and numbers that follow."""
        base = [self.value()] if name == "log" and self.take("_") else []
        exponent = self.signed_power() if self.take("^") else sympy.Integer(1)
        bracketed = self.next in _CLOSING
        argument = self.value() if bracketed else self.signed_power()
        while not bracketed and re.match(r"[0-9.a-zA-Z]", self.next) and self.next not in _FUNCTIONS:
            argument = argument * self.power()
        return _FUNCTIONS[name](argument, *base) ** exponent

    def subscript(self) -> str:
        if not self.take("_"):
            return ""
        braced = self.take("{")
        token, self.at = self.next, self.at + 1
        if not token.isalnum() or (braced and not self.take("}")):
            raise Unreadable("_")
        return f"_{token}"
