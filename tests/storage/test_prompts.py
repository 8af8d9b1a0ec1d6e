import pytest

from storage.prompts import read_prompts, write_prompts
from storage.run import Run
from tba.errors import Damaged, DataError, Missing
from tests.builders import make_prompt

pytestmark = pytest.mark.parametrize("root", ["local"], indirect=True)

PROMPTS = [
    make_prompt("train/1", text="2+2=", tokens=(1, 2), answer="4", metadata={"digits": 1, "tags": ["a", "é"]}),
    make_prompt("train/0", metadata={}),
]


def test_prompts_come_back_exactly_and_in_order(run: Run):
    write_prompts(run, "train", PROMPTS)
    assert read_prompts(run, "train") == PROMPTS


def test_a_split_may_be_empty(run: Run):
    write_prompts(run, "test", [])
    assert read_prompts(run, "test") == []


def test_the_same_prompts_again_are_done_already(run: Run):
    write_prompts(run, "train", PROMPTS)
    write_prompts(run, "train", [make_prompt("train/1", text="2+2=", tokens=(1, 2), answer="4",
                                             metadata={"digits": 1, "tags": ("a", "é")}), PROMPTS[1]])  # fmt: skip
    assert read_prompts(run, "train") == PROMPTS


def test_other_prompts_are_refused(run: Run):
    write_prompts(run, "train", PROMPTS)
    with pytest.raises(DataError, match=r"prompts/train\.parquet holds other prompts"):
        write_prompts(run, "train", PROMPTS[:1])
    assert read_prompts(run, "train") == PROMPTS


def test_a_prompt_that_is_there_twice_is_refused(run: Run):
    with pytest.raises(DataError, match="split 'train': prompt_id 'train/0'"):
        write_prompts(run, "train", [*PROMPTS, PROMPTS[1]])


def test_a_split_that_is_missing_or_damaged_is_named(run: Run):
    with pytest.raises(Missing, match=r"prompts/test\.parquet"):
        read_prompts(run, "test")
    run.store.create("prompts/test.parquet", b"nothing of the kind")
    with pytest.raises(Damaged, match=r"prompts/test\.parquet"):
        read_prompts(run, "test")
