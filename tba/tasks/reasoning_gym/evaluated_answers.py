"""Some scorers of reasoning_gym evaluate the answer as Python code. They get only answers that are no code.

A model may write anything, and what it writes must never run. Four data sets call `eval`, which may only see a literal
such as `[1, 2]`. Five data sets call `parse_expr` of sympy, which uses `eval` too, and which may only see a formula: of
numbers, variables, the four operations, powers, and functions that are listed here.
"""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

FUNCTIONS = (
    "sin", "cos", "tan", "cot", "sec", "csc", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh",
    "exp", "log", "ln", "sqrt", "Abs",
)  # fmt: skip
_OPERATIONS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow, ast.UAdd, ast.USub)
_FORMULA = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Load, *_OPERATIONS)
_VARIABLE = re.compile(r"[A-Za-z][A-Za-z0-9]*")


def is_literal(text: str) -> bool:
    try:
        ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return False
    return True


def is_formula(text: str) -> bool:
    if not text.isascii():  # Python reads some other letters as ASCII letters
        return False
    try:
        return all(map(_is_in_formula, ast.walk(ast.parse(text.strip(), mode="eval"))))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _is_in_formula(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return type(value) in (int, float)
        case ast.Name(id=name):
            return bool(_VARIABLE.fullmatch(name))
        case ast.Call(func=ast.Name(id=name), keywords=[]):
            return name in FUNCTIONS
        case _:
            return isinstance(node, _FORMULA)


EVALUATED: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(("binary_matrix", "n_queens", "spiral_matrix", "string_insertion"), is_literal),
    **dict.fromkeys(
        ("countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"),
        is_formula,
    ),
}
"""The data sets whose scorers evaluate an answer, each with the check of what may be evaluated."""


def is_safe(dataset: str, answer: str, entry: Mapping[str, Any]) -> bool:
    """Return False if the scorer of a data set would run the answer as code. The right answer is always safe."""
    if dataset not in EVALUATED:
        return True
    right = [str(entry["answer"]), *entry["metadata"].get("valid_answers", ())]
    return answer.strip() in [text.strip() for text in right] or EVALUATED[dataset](answer)
