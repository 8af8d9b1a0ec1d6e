"""Check constraints with the checkers of IFEval (arXiv:2311.07911) and IFBench (arXiv:2507.02833), which the library
if-verifiable contains. A response that can be checked in time always gets the same result, on every machine."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib import import_module
from typing import Any, NamedTuple

from tba.errors import ConfigError
from tba.tasks.instructions.constraints import Constraint

NEEDED_DATA = {
    "length_constraints:number_sentences": ("tokenizers/punkt_tab",),
    "change_case:capital_word_frequency": ("tokenizers/punkt_tab",),
    "words:keywords_specific_position": ("tokenizers/punkt_tab",),
    "words:words_position": ("tokenizers/punkt_tab",),
    "words:start_verb": ("tokenizers/punkt_tab", "taggers/averaged_perceptron_tagger_eng"),
    "format:title_case": ("tokenizers/punkt_tab",),
    "ratio:stop_words": ("corpora/stopwords",),
}
"""Data of NLTK that a checker reads, by kind. NLTK downloads it; no package contains it."""

_A_TEXT = "This is a response. It has two sentences, and it ends here."


class Library(NamedTuple):
    ifeval: Mapping[str, Any]  # the classes of the checkers, by kind
    ifbench: Mapping[str, Any]
    trimmed: Callable[[str], str]
    """Return a response without the thinking before it, and without white space around it."""
    variants: Callable[[str], list[str]]
    """Return a response with and without its first line, its last line and its asterisks."""

    @property
    def kinds(self) -> Mapping[str, Any]:
        return {**self.ifeval, **self.ifbench}


@cache
def library() -> Library:
    """Import the library. This takes seconds, so it happens when the first response is checked."""
    # The language of a text is estimated with random numbers, and without a seed with new ones each time.
    import_module("langdetect").DetectorFactory.seed = 0
    with _without_downloads():
        ifeval, ifbench = (
            import_module(f"if_verifiable.{name}.instructions_registry").INSTRUCTION_DICT
            for name in ("ifeval", "ifbench")
        )
        common = import_module("if_verifiable.common")
    return Library(ifeval, ifbench, common.strip_thinking, common.get_loose_transformations)


@contextmanager
def _without_downloads() -> Iterator[None]:
    """Keep NLTK from downloading. The checkers of IFBench download NLTK's data when they are imported, so results would
    depend on the network, and a machine without a network would wait."""
    nltk: Any = import_module("nltk")
    download, nltk.download = nltk.download, lambda *names, **options: False
    try:
        yield
    finally:
        nltk.download = download


def fault(constraint: Constraint) -> str:
    """Return what is wrong with a constraint, or an empty string. Without this check, a checker would replace missing
    arguments by random ones, and the library would skip unknown kinds."""
    if constraint.kind not in library().kinds:
        return f"unknown kind of constraint {constraint.kind!r}"
    try:
        checker, known = _build(constraint)
        if not _lacking_data(constraint.kind):
            checker.check_following(_A_TEXT)  # keywords are regular expressions, which may be malformed
    except Exception as error:  # the library checks arguments in its own ways
        return f"the arguments of {constraint.kind!r} are refused: {type(error).__name__}: {error}"
    missing = [name for name in known if name not in constraint.arguments]
    return f"{constraint.kind!r} needs the argument {missing[0]!r}" if missing else ""


def obstacle(constraint: Constraint) -> str:
    """Return why a constraint without a fault cannot be checked here, or an empty string if it can."""
    if lacking := _lacking_data(constraint.kind):
        names = " ".join(place.rpartition("/")[2] for place in lacking)
        return f"{constraint.kind!r} needs data of NLTK, which is not installed: python -m nltk.downloader {names}"
    _, known = _build(constraint)
    for name, value in constraint.arguments.items():
        if name in known and _plain(known[name]) != _plain(value):
            return f"the checker of {constraint.kind!r} does not take {name}={value!r}, and would draw a random value"
    return ""


def holds(constraint: Constraint, text: str) -> bool:
    """Return True if a text keeps a constraint. A text that makes the checker fail does not keep it."""
    checker = _checker(constraint.kind, json.dumps(dict(constraint.arguments), sort_keys=True))
    try:
        return bool(text.strip()) and bool(checker.check_following(text))
    except (OSError, MemoryError):
        raise  # a problem of this machine says nothing about the text
    except Exception:
        return False


def holds_loosely(constraint: Constraint, text: str) -> bool:
    """Return True if a variant of the text keeps the constraint. IFEval and IFBench publish this as loose accuracy."""
    return any(holds(constraint, variant) for variant in dict.fromkeys(library().variants(text)))


@lru_cache(maxsize=4096)
def _checker(kind: str, arguments: str) -> Any:
    if lacking := obstacle(constraint := Constraint(kind, json.loads(arguments))):
        raise ConfigError(f"a response cannot be checked on this machine: {lacking}")
    return _build(constraint)[0]


def _build(constraint: Constraint) -> tuple[Any, Mapping[str, Any]]:
    """Return a checker, and the arguments that it goes by."""
    checker = library().kinds[constraint.kind](constraint.kind)
    checker.build_description(**constraint.arguments)
    return checker, checker.get_instruction_args() or {}


def _lacking_data(kind: str) -> tuple[str, ...]:
    return tuple(place for place in NEEDED_DATA.get(kind, ()) if not _has_data(place))


def _has_data(place: str) -> bool:
    try:
        import_module("nltk").data.find(place)
    except LookupError:
        return False
    return True


def _plain(value: Any) -> Any:
    """Return an argument as checkers compare it: they sort words, and ignore case and surrounding white space."""
    if isinstance(value, str):
        return value.strip().lower()
    return sorted({_plain(item) for item in value}) if isinstance(value, list | tuple) else value
