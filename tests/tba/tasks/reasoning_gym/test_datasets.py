"""Every data set of the library: its problems are the same in every process, a stored problem is the same as a new one,
and no answer runs as code."""

import ast
import inspect
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tba.errors import ConfigError
from tba.tasks.reasoning_gym.entries import decode, encode
from tba.tasks.reasoning_gym.evaluated_answers import EVALUATED, is_formula, is_literal
from tba.tasks.reasoning_gym.library import Library
from tba.tasks.reasoning_gym.library_process import REFUSED
from tba.tasks.reasoning_gym.splits import DataSet, Entry
from tests.support.laptop import needs

SEED, SIZE = 7, 3
WRITES = 448  # seed of a problem of codeio whose program writes a file
UNHEARD_OF = (
    "",
    "0",
    "42",
    "yes",
    "[]",
    "{}",
    "a b c",
    "[[1, 2], [3, 4]]",
    '{"a": 1}',
    "1/2",
    "x",
    "(",
    "-1e999",
    "²",
    "\0",
)
"""Answers that are right for hardly any problem."""


@pytest.fixture(scope="module")
def library() -> Iterator[Library]:
    with closing(Library()) as library:
        yield library


def names() -> list[str]:
    from reasoning_gym.factory import DATASETS

    return sorted(set(DATASETS) - set(REFUSED))


def draw(library: Library, name: str) -> list[Entry]:
    return library.draw(DataSet(name=name), SEED, SIZE)


@needs("reasoning_gym")
@pytest.mark.slow
def test_two_processes_make_the_same_problems_of_every_data_set(library: Library):
    with closing(Library()) as other:
        differ = [name for name in names()[::-1] if draw(library, name) != draw(other, name)]
    assert len(names()) > 100 and differ == []


@needs("reasoning_gym")
@pytest.mark.slow
def test_the_right_answer_of_every_data_set_earns_everything_and_others_at_most_that(library: Library):
    wrong: dict[str, Any] = {}
    for name in names():
        for entry in json.loads(json.dumps(draw(library, name))):
            if entry["answer"] is not None and library.score(name, {}, entry, entry["answer"]) != 1.0:
                wrong[name] = entry["answer"]
            for answer in (None, *UNHEARD_OF):
                score = library.score(name, {}, entry, answer)
                if not (score is None or 0 <= score <= 1):
                    wrong[name] = (answer, score)
    assert wrong == {}


@needs("reasoning_gym")
@pytest.mark.parametrize(
    ("name", "answer"), [("boxnet", "[[1]]"), ("game_of_life", "{}"), ("prime_factorization", "yes")]
)
def test_an_answer_on_which_a_scorer_fails_has_no_score(library: Library, name: str, answer: str):
    assert library.score(name, {}, draw(library, name)[0], answer) is None


@needs("reasoning_gym")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_problems_of_every_data_set_are_the_same_after_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from reasoning_gym.factory import create_dataset

    monkeypatch.chdir(tmp_path)  # for files that programs of the library write
    differ = []
    for name in names():
        entry = create_dataset(name, seed=SEED, size=SIZE)[0]
        if decode(json.loads(json.dumps(encode(entry)))) != entry:
            differ.append(name)
    assert differ == []


@needs("reasoning_gym")
def test_a_program_of_the_library_writes_no_file_into_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    with closing(Library()) as library:
        [entry] = library.draw(DataSet(name="codeio"), WRITES, 1)
    assert "sailor_performance.csv" in entry["question"]
    assert list(tmp_path.iterdir()) == []


@needs("reasoning_gym")
def test_a_stored_problem_of_a_data_set_that_the_library_lacks_is_refused_by_name(library: Library):
    with pytest.raises(ConfigError, match="must be a data set of reasoning_gym, got 'retired'"):
        library.score("retired", {}, {"question": "?", "answer": "1", "metadata": {}}, "1")


# --- answers that are code --------------------------------------------------------------------------------------------


@needs("reasoning_gym")
def test_every_module_that_evaluates_text_is_known():
    from reasoning_gym.factory import DATASETS

    folder = Path(inspect.getfile(DATASETS["gcd"][0])).parents[1]
    evaluating = {path.stem for path in folder.rglob("*.py") if EVALUATING & _called(path.read_text("utf-8"))}
    modules = {Path(inspect.getfile(DATASETS[name][0])).stem for name in EVALUATED}
    assert evaluating == modules | KEPT_FROM_ANSWERS


EVALUATING = {"eval", "exec", "parse_expr", "sympify"}
KEPT_FROM_ANSWERS = {
    "basic_arithmetic", "bitwise_arithmetic", "generators_00_49", "generators_50_99",  # evaluate their own problems
    "codeio",  # runs the programs of its problems
    "number_sorting",  # evaluates the right answer
    "propositional_logic",  # its own `parse_expr` evaluates nothing
}  # fmt: skip
"""Modules that evaluate something, but never an answer."""


def _called(source: str) -> set[str]:
    """Return the names of the functions and methods that some source calls."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", "") for call in calls}


@needs("reasoning_gym")
@pytest.mark.parametrize("name", EVALUATED)
def test_an_answer_never_runs(library: Library, name: str, tmp_path: Path):
    file = tmp_path / "ran"
    [entry, *_] = draw(library, name)
    for code in (
        f"open({str(file)!r}, 'w')",
        f"[open({str(file)!r}, 'w')]",
        f"__import__('pathlib').Path({str(file)!r}).touch()",
        f"sin(x for x in [open({str(file)!r}, 'w')])",
        f"sin.__class__.__mro__[-1].__subclasses__()[0] or open({str(file)!r}, 'w')",
        f"(lambda: open({str(file)!r}, 'w'))()",
    ):
        assert library.score(name, {}, entry, code) in (0.0, 0.01)
    assert not file.exists()


@pytest.mark.parametrize("text", ["[1, 2]", "[['Q', '_'], ['_', 'Q']]", "('a',)", " 'a'", "-1"])
def test_a_literal_may_be_evaluated(text: str):
    assert is_literal(text)


@pytest.mark.parametrize(
    "text", ["f()", "[f()]", "x", "1 + 1", "'a' * 9", "[x for x in []]", "(", "\0", "[" * 9999, ""]
)
def test_other_python_is_no_literal(text: str):
    assert not is_literal(text)


@pytest.mark.parametrize(
    "text", ["24", "(1 + 2) * 8 / 3 - -4", "x**2/2 + C", "-exp(x)*sin(2*x)", "sqrt(x1)", "2.5*log(x)", "1e3"]
)
def test_a_formula_may_be_evaluated(text: str):
    assert is_formula(text)


@pytest.mark.parametrize(
    "text",
    [
        "eval('1')", "x.real", "x[0]", "lambda: 1", "f(x)", "sin(x, y=1)", "sin(*x)", "_x", "__import__", "'a'",
        "True", "x if x else 1", "[x]", "(1, 2)", "x := 1", "1 < 2", "x | y", "1 // 2", "~1", "b'a'", "f'{x}'", "x\ny",
        "ﬁ", "(", "", "4!", "\0", "(" * 9999, "9" * 9999,
    ],
)  # fmt: skip
def test_other_python_is_no_formula(text: str):
    assert not is_formula(text)
