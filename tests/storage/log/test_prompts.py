import random
from collections import Counter

import pyarrow as pa
import pytest

from storage import layout
from storage.log.prompts import PROMPTS_SCHEMA, read_prompts, write_prompts
from storage.objects import parquet
from storage.runs.run import Run
from tba.errors import Damaged, DataError, Missing
from tests.support.builders import make_prompt
from tests.support.storage.synthetic import put

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


def test_no_flipped_bit_makes_other_prompts(run: Run):
    prompts = [make_prompt(f"train/{n}", text=f"{n}+1=", answer=str(n + 1)) for n in range(200)]
    write_prompts(run, "train", prompts)
    whole, outcomes, chance = run.store.read(layout.prompts("train")), Counter[str](), random.Random(0)
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        put(run, layout.prompts("train"), bytes(damaged))
        try:
            outcomes["the same" if read_prompts(run, "train") == prompts else "others"] += 1
        except Damaged as error:
            assert "prompts/train.parquet" in str(error)
            outcomes["refused"] += 1
    assert outcomes["others"] == 0
    assert outcomes["refused"] > 150


ROW = {"prompt_id": "a", "text": "", "tokens": [1], "answer": "", "metadata": "{}"}


@pytest.mark.parametrize(
    "table",
    [
        pa.table({"prompt_id": ["a"], "text": [""]}),
        pa.Table.from_pylist([ROW], schema=PROMPTS_SCHEMA).append_column("answer", pa.array(["x"])),
        pa.Table.from_pylist([{**ROW, "tokens": None}], schema=PROMPTS_SCHEMA),
        pa.Table.from_pylist([{**ROW, "metadata": "{"}], schema=PROMPTS_SCHEMA),
    ],
)
def test_what_somebody_else_wrote_is_named(run: Run, table: pa.Table):
    put(run, layout.prompts("train"), parquet.encode(table))
    with pytest.raises(Damaged, match=r"prompts/train\.parquet"):
        read_prompts(run, "train")
