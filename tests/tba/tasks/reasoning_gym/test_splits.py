"""How problems are divided among data sets, training and evaluation, without the library."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tba.config import TaskConfig, parse_options
from tba.errors import ConfigError
from tba.tasks.reasoning_gym.splits import DataSet, Entry, Options, choose, interleaved, shares


def draw_numbers(dataset: DataSet, seed: int, size: int) -> list[Entry]:
    """Draw problems of a data set that has as many different ones as the digits of its name say."""
    return [{"question": f"{dataset.name}:{(seed + i) % int(dataset.name)}"} for i in range(size)]


def test_a_pattern_chooses_among_the_questions_of_its_data_set_alone():
    even = DataSet(name="300", pattern="[02468]$")
    splits = choose(Options(datasets=(even, DataSet(name="90")), train_size=60, test_size=20), draw_numbers, bool)
    questions = [(dataset.name, entry["question"]) for split in splits.values() for dataset, entry in split]
    assert len(questions) == 80
    assert {int(question[-1]) % 2 for name, question in questions if name == "300"} == {0}
    assert {int(question[-1]) % 2 for name, question in questions if name == "90"} == {0, 1}


def test_a_pattern_that_hardly_any_question_has_is_refused_with_the_number_of_those_without_it():
    options = Options(datasets=(DataSet(name="300", pattern="^300:77$"),), train_size=5, test_size=5)
    with pytest.raises(ConfigError, match=r"test_size: 5 .* only 1 different ones; \d+ do not match '\^300:77\$'"):
        choose(options, draw_numbers, bool)


def test_a_pattern_that_is_no_regular_expression_is_refused():
    with pytest.raises(ConfigError, match=r"task\.options\.datasets: pattern must be a regular expression, got '\('"):
        parse_options(Options, TaskConfig(options={"datasets": {"gcd": {"pattern": "("}}}))


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(0.01, 10)), min_size=1, max_size=4), st.integers(1, 99))
def test_splits_are_apart_for_any_mixture_or_it_is_refused(kinds: list[tuple[int, float]], size: int):
    datasets = [DataSet(name=str(number), weight=weight) for number, weight in kinds]
    options = Options(datasets=tuple(datasets), train_size=size, test_size=20)
    try:
        splits = choose(options, draw_numbers, lambda question: True)
    except ConfigError as refused:
        assert "different ones" in str(refused)
        return
    assert (len(splits["train"]), len(splits["test"])) == (size, 20)
    questions = [entry["question"] for split in splits.values() for _, entry in split]
    assert len(set(questions)) == size + 20


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 1000))
def test_shares_add_up_and_are_off_by_less_than_one(weights: list[float], size: int):
    counts = shares(weights, size)
    assert sum(counts) == size
    assert all(abs(n - size * w / sum(weights)) < 1 for n, w in zip(counts, weights, strict=True))


def test_interleaving_keeps_the_order_of_each_list():
    assert interleaved([["a", "b", "c", "d"], [], ["x", "y"]]) == ["a", "x", "b", "c", "y", "d"]
