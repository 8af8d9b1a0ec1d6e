"""The graders of `math`, on all kinds of answers that MATH has. Columns say whether an answer is right (1) or wrong (0)
under math-verify, minerva, prm800k and boxed."""

import json
import re
import time
from collections.abc import Sequence
from itertools import pairwise

import pytest

from tba.tasks.registry import grade, rules
from tests.support.original_data import original_data
from tests.support.sampled_parameters import sampled

RULES = ("math-verify", "minerva", "prm800k", "boxed")


def golds() -> list[str]:
    """Return the answers of MATH-500."""
    return [json.loads(line)["answer"] for line in original_data("math500/test.jsonl").read_text().splitlines()]


def graded(response: str, answer: str) -> tuple[float, ...]:
    return tuple(grade("math", rule, response, answer) for rule in RULES)


def graded_box(given: str, answer: str) -> tuple[float, ...]:
    return graded(f"Therefore the answer is $\\boxed{{{given}}}$.", answer)


def test_the_rules_have_names_and_the_library_comes_first():
    assert tuple(rules("math")) == RULES


# --- where the answer stands ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "answer", "right"),
    [
        (r"So $\boxed{18}$.", "18", (1, 1, 1, 1)),
        (r"So $\fbox{18}$.", "18", (1, 1, 1, 1)),
        (r"So $\boxed 18$, I think", "18", (1, 1, 1, 1)),
        (r"So $\boxed{17}$.", "18", (0, 0, 0, 0)),
        (r"$\boxed{\boxed{18}}$", "18", (1, 1, 1, 1)),
        (r"$\boxed{\frac{1}{\sqrt{2}}}$", r"\frac{1}{\sqrt{2}}", (1, 1, 1, 1)),
        (r"$\boxed{3}$, no: $\boxed{18}$", "18", (1, 0, 1, 1)),  # minerva takes every box
        (r"$\boxed{18}$, no: $\boxed{3}$", "18", (0, 0, 0, 0)),
        (r"$\boxed{18}$, checked: $\boxed{18}$", "18", (1, 1, 1, 1)),
        (r"$\boxed{18}$ <think>hm</think>", "18", (0, 1, 1, 0)),
        (r"<think>$\boxed{3}$</think> $\boxed{18}$", "18", (1, 0, 1, 1)),
        (r"<think>it may be $\boxed{18}$", "18", (1, 1, 1, 1)),  # the closing tag is missing
        (r"$\boxed{18}$, or rather $\boxed{1", "18", (0, 1, 0, 0)),  # cut off
        ("18", "18", (0, 1, 0, 0)),
        ("The answer is 18.", "18", (0, 1, 0, 0)),
        ("Final Answer: The final answer is $18$. I hope it is correct.", "18", (0, 1, 0, 0)),
        ("The final answer is $18$. I hope it is correct. 3 more lines", "18", (0, 1, 0, 0)),
        ("Of 20 pages 2 are left\n```output\n18\n```\nafter 3 days", "18", (0, 1, 0, 0)),
        ("Of 20 pages 2 are left, so 1,018", "1018", (0, 1, 0, 0)),
        ("Of 20 pages 2 are left.\n\n# Answer\n\n18", "18", (0, 1, 1, 0)),
        ("", "18", (0, 0, 0, 0)),
        (r"\boxed{}", "18", (0, 0, 0, 0)),
        (r"\boxed", "18", (0, 0, 0, 0)),
        ("I do not know", "18", (0, 0, 0, 0)),
    ],
)
def test_each_rule_finds_the_answer_in_its_own_way(response: str, answer: str, right: Sequence[int]):
    assert graded(response, answer) == tuple(right)


# --- when two answers are the same ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "answer", "right"),
    [
        # spelling
        (r"\frac12", r"\frac{1}{2}", (1, 1, 1, 1)),
        (r"\dfrac{1}{2}", r"\frac{1}{2}", (1, 1, 1, 1)),
        ("1/2", r"\frac{1}{2}", (1, 1, 1, 1)),
        ("0.5", r"\frac{1}{2}", (1, 1, 1, 1)),
        (".5", r"\frac{1}{2}", (1, 1, 1, 1)),
        (r"\frac{-1}{2}", r"-\frac{1}{2}", (1, 1, 1, 1)),
        (r"\sqrt2", r"\sqrt{2}", (1, 1, 1, 1)),
        (r"\left(1,2\right)", "(1, 2)", (1, 1, 1, 1)),
        ("x = 5", "5", (1, 1, 1, 1)),
        ("5", "x=5", (1, 1, 1, 1)),
        ("4210_5", "4210_{5}", (1, 1, 1, 1)),
        # numbers
        ("1234", "1,234", (1, 1, 1, 1)),
        ("11,111,111,100", r"11,\! 111,\! 111,\! 100", (1, 1, 1, 1)),
        ("18.00", "18", (1, 1, 1, 1)),
        ("10/2", "5", (1, 1, 0, 0)),
        ("0.25", r"\frac14", (1, 1, 1, 1)),
        ("0.3333", r"\frac13", (0, 1, 0, 0)),
        ("0.33", r"\frac13", (0, 0, 0, 0)),
        ("10.8167", r"3\sqrt{13}", (0, 1, 0, 0)),
        (r"\frac{2}{4}", r"\frac{1}{2}", (1, 1, 0, 0)),
        (r"\frac{9}{5}", r"1\frac{4}{5}", (1, 1, 1, 1)),
        (r"-\frac{9}{5}", r"-1\frac{4}{5}", (1, 1, 1, 1)),
        ("0", ".0000672", (0, 1, 0, 0)),
        # percent, money and units
        (r"50\%", "50", (1, 1, 1, 1)),
        (r"50\%", "0.5", (1, 1, 0, 0)),
        ("50", "0.5", (0, 1, 0, 0)),
        ("50", "5000", (0, 1, 0, 0)),
        (r"50\%", "5000", (0, 0, 0, 0)),
        (r"\$18.90", "18.90", (1, 1, 1, 1)),
        ("90", r"90^\circ", (1, 1, 1, 1)),
        ("864", r"864 \mbox{ inches}^2", (1, 1, 1, 1)),
        (r"5 \text{ days}", "5", (1, 1, 1, 1)),
        (r"5 \text{ days}", r"5 \text{ nights}", (1, 1, 1, 1)),
        # words
        ("east", r"\text{east}", (1, 1, 1, 1)),
        (r"\text{west}", r"\text{east}", (0, 0, 0, 0)),
        (r"\text{ west}", r"\text{ east}", (0, 0, 0, 0)),
        ("C", r"\text{(C)}", (1, 1, 1, 1)),
        (r"{\text{east}}", r"\text{east}", (1, 1, 1, 1)),
        # tuples, intervals, sets, lists
        ("(1,2)", "[1,2]", (0, 1, 0, 0)),
        ("(1,2]", "(1,2)", (0, 1, 0, 0)),
        ("(2,1)", "(1,2)", (0, 0, 0, 0)),
        ("(1,2,3)", "(1,2)", (0, 0, 0, 0)),
        ("(12)", "(1,2)", (0, 0, 0, 0)),
        (r"\left(\frac{3}{5},\frac{16}{6}\right]", r"\left(\frac{3}{5},\frac{8}{3}\right]", (1, 1, 0, 0)),
        (r"(-\infty,2)\cup(3,\infty)", r"(-\infty, 2) \cup (3, \infty)", (1, 1, 1, 1)),
        (r"(2,12)\cup(12102)", r"(2,12) \cup (12,102)", (0, 0, 0, 0)),
        (r"(-\infty,2)", r"(-\infty, 2) \cup (3, \infty)", (0, 0, 0, 0)),
        ("-2,1", "1,-2", (1, 1, 0, 0)),
        ("1", "1,-2", (0, 0, 0, 0)),
        ("1,-2,1", "1,-2", (1, 0, 0, 0)),
        (r"1+\sqrt{19}, 1-\sqrt{19}", r"1 \pm \sqrt{19}", (1, 0, 0, 0)),
        # matrices
        (
            r"\begin{pmatrix} -2/6 \\ 2/3 \end{pmatrix}",
            r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}",
            (1, 1, 0, 0),
        ),
        (r"\begin{pmatrix} 12 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", (0, 0, 0, 0)),
        (r"\begin{pmatrix} 1 & 2 \end{pmatrix}", r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", (0, 0, 0, 0)),
        # expressions and equations
        (r"\sqrt{117}", r"3\sqrt{13}", (1, 1, 1, 1)),
        (r"\sqrt{118}", r"3\sqrt{13}", (0, 0, 0, 0)),
        (r"\frac{1}{\sqrt3}", r"\frac{\sqrt{3}}{3}", (1, 1, 1, 1)),
        ("(x+1)^2", "x^2+2x+1", (1, 1, 1, 1)),
        ("(x+1)^2", "x^2+2x", (0, 0, 0, 0)),
        (r"\frac{\cos x}{\sin x}", r"\cot x", (1, 1, 1, 1)),
        (r"\pi r^2", r"r \cdot r \pi", (1, 1, 1, 1)),
        (r"2 \theta", r"\theta + \theta", (1, 1, 0, 0)),  # prm800k counts the letters of "theta"
        ("-5i+6", "6 - 5i", (1, 1, 1, 1)),
        ("a+b+c+d", "d+c+b+a", (1, 1, 0, 0)),  # prm800k does not compute with more than two variables
        ("y-2x-3=0", "y = 2x + 3", (1, 1, 0, 0)),
        ("2x+3", "y = 2x + 3", (1, 1, 1, 1)),
        (r"2^{10}+\pi", r"1024+\pi", (1, 1, 0, 0)),  # nor with powers of more than nine
        ("5!", "120", (1, 0, 0, 0)),
    ],
)
def test_each_rule_compares_in_its_own_way(given: str, answer: str, right: Sequence[int]):
    assert graded_box(given, answer) == tuple(right)


@pytest.mark.parametrize("rule", RULES)
def test_every_answer_of_math_500_is_right_when_it_is_given(rule: str):
    assert [gold for gold in golds() if not grade("math", rule, f"So $\\boxed{{{gold}}}$.", gold)] == []


@pytest.mark.parametrize("rule", RULES)
def test_no_answer_of_math_500_is_right_for_another(rule: str):
    """Each answer is compared with its neighbour in the file. One pair is equal, and minerva takes percents for
    shares."""
    answers = golds()
    pairs = [(given, gold) for given, gold in pairwise(answers) if given != gold]
    taken = [(given, gold) for given, gold in pairs if grade("math", rule, f"$\\boxed{{{given}}}$", gold)]
    assert len(pairs) > 450 and taken == [("5", "x=5"), *([("200", "2")] if rule == "minerva" else [])]


@pytest.mark.parametrize("rule", RULES)
def test_fractions_of_math_500_are_right_however_they_are_spelt(rule: str):
    fraction = re.compile(r"(-?)\\d?frac\{(\d+)\}\{(\d+)\}")
    found = [(gold, match) for gold in golds() if (match := fraction.fullmatch(gold))]
    assert len(found) == 50
    for gold, match in found:
        sign, above, below = match.groups()
        for spelling in ("{0}{1}/{2}", "{0}\\dfrac {{{1}}} {{{2}}}", "\\frac{{{0}{1}}}{{{2}}}"):
            assert grade("math", rule, f"$\\boxed{{{spelling.format(sign, above, below)}}}$", gold), (spelling, gold)
        assert not grade("math", rule, f"$\\boxed{{{sign}{above}1/{below}}}$", gold)


def test_the_graders_differ_over_the_answers_of_math_500_where_their_rules_do():
    whole = [int(gold) for gold in golds() if re.fullmatch(r"-?\d+", gold)]
    fractions = [
        (int(above), int(below)) for above, below in re.findall(r"(?m)^\\d?frac\{(\d+)\}\{(\d+)\}$", "\n".join(golds()))
    ]
    assert (len(whole), len(fractions)) == (311, 47)

    def right(pairs: list[tuple[str, str]]) -> tuple[int, ...]:
        return tuple(int(sum(column)) for column in zip(*(graded_box(*pair) for pair in pairs), strict=True))

    assert right([(f"{n - 1}+1", f"{n}") for n in whole]) == (311, 311, 0, 0)
    assert right([(f"{100 * n}", f"{n}") for n in whole if n]) == (0, 304, 0, 0)
    assert right([(f"\\frac{{{2 * a}}}{{{2 * b}}}", f"\\frac{{{a}}}{{{b}}}") for a, b in fractions]) == (47, 47, 0, 0)
    assert right([(f"\\frac{{{b}}}{{{a}}}", f"\\frac{{{a}}}{{{b}}}") for a, b in fractions]) == (0, 0, 0, 0)


# --- what a model might write -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "given",
    [
        r"\frac{1}{0}",
        r"\frac",
        r"\frac{",
        r"\sqrt",
        "((((",
        "1" * 5000,
        "(" * 400 + ")" * 400,
        pytest.param("x^" * 300, marks=pytest.mark.long),
        r"\frac{1}{" * 60 + "2" + "}" * 60,
        "\ud800 \x00 ☃",
        "١٢",
        "__import__('os').abort()",
        "5 = 5 = 5",
        ",",
        "inf",
        "nan",
        "1e400",
    ],
)
def test_nonsense_is_wrong_and_nothing_worse(given: str):
    assert graded_box(given, r"\frac{x}{3}") == (0, 0, 0, 0)


def test_a_response_full_of_boxes_takes_no_time():
    began = time.monotonic()
    graded("\\boxed{" * 5000, "18")
    graded("$\\boxed{3}$ " * 2000, "18")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("rule", sampled(["math-verify", "minerva"], kept=["math-verify"]))
def test_a_power_that_cannot_be_computed_is_wrong_in_time_and_the_next_answer_is_graded(rule: str):
    began = time.monotonic()
    assert not grade("math", rule, r"$\boxed{9^{9^{9^{9}}}}$", r"\pi")
    assert time.monotonic() - began < 60
    assert grade("math", rule, r"$\boxed{\frac{3}{\sqrt3}}$", r"\sqrt{3}")
