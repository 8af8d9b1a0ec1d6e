"""Names of objects: each is parsed back to its parts, and no other name is accepted."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage import layout
from storage.objects.store import check_key
from tba.types import Version
from tests.support.storage.synthetic import STRANGERS

numbers = st.integers(0, 999_999_999)


@given(number=numbers, attempt=numbers)
def test_every_name_is_parsed_back(number: int, attempt: int):
    version = Version(number, attempt)
    for folder in (layout.version(version), layout.checkpoint(version)):
        assert layout.parse_folder(folder + layout.MANIFEST) == (version, layout.MANIFEST)
        assert layout.parse_folder(f"{folder}a/b.safetensors") == (version, "a/b.safetensors")
        assert layout.parse_folder(folder) is None
    assert layout.parse_ledger(layout.draws(number, attempt)) == version
    assert layout.parse_ledger(layout.steps(number, attempt)) == version
    assert layout.parse_evaluation(layout.evaluation(version)) == version
    assert layout.parse_sync(layout.sync(number)) == number
    assert layout.parse_attempt(layout.attempt(attempt)) == attempt
    assert layout.parse_arithmetic(layout.arithmetic(attempt)) == attempt
    assert layout.parse_rendezvous(layout.rendezvous(attempt)) == attempt
    assert layout.parse_prompts(layout.prompts("train")) == "train"


@given(number=numbers, life=numbers)
def test_every_name_is_part_of_a_run(number: int, life: int):
    version = Version(number, life)
    for key in (
        layout.RUN, layout.STATE, layout.REPORT, layout.prompts("test"), layout.shard(number, life),
        layout.sync(number), layout.draws(*version), layout.steps(*version), layout.attempt(life),
        layout.version(version) + "config.json", layout.checkpoint(version) + layout.MANIFEST,
        layout.evaluation(version), layout.event("searcher-001", life, number), layout.retention(number),
        layout.lease("trainer"), layout.log("trainer", life), layout.arithmetic(life), layout.rendezvous(life),
    ):  # fmt: skip
        assert layout.is_part(check_key(key))


@pytest.mark.parametrize("name", STRANGERS)
def test_other_names_are_not_part_of_a_run(name: str):
    assert not layout.is_part(name)


def test_a_number_beyond_its_column_is_no_name():
    assert layout.parse_sync(layout.sync(10**9)) is None
    assert layout.parse_ledger(layout.steps(1, 10**9)) is None
