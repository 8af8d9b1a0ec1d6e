"""How a batch is divided among ranks, and how it comes to another process."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tba.batches.batching import Batch, groups_at
from tba.distributed.ranks import ALONE, rows_of, shares
from tba.train.leader import batch_of, batch_values
from tests.support.tba.rank_batches import K, P, batch_at


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 9))
def test_every_group_is_one_ranks_and_none_has_many_more_than_another(costs, size):
    found = shares(costs, size)
    assert len(found) == size and sorted(group for groups in found for group in groups) == list(range(len(costs)))
    room = -(-len(costs) // size)
    assert max(map(len, found)) <= room
    loads = [sum(costs[group] for group in groups) for groups in found]
    if len(costs) >= size and len(costs) % size == 0:
        assert max(loads) - min(loads) <= max(costs) * room


@given(st.integers(1, 9), st.integers(1, 40))
def test_rows_are_divided_as_torch_divides_them(size, total):
    parts = torch.arange(total).chunk(size)
    expected = [part.tolist() for part in parts] + [[]] * (size - len(parts))
    assert [list(rows_of(rank, size, total)) for rank in range(size)] == expected


@given(st.lists(st.integers(0, P - 1), min_size=1, max_size=P, unique=True))
def test_a_share_is_the_batchs_own_rows(groups):
    batch = batch_at(1)
    part = groups_at(batch, groups)
    for n, group in enumerate(groups):
        for j in range(K):
            assert part.lengths[n * K + j] == batch.lengths[group * K + j]
            for name in ("tokens_BT", "response_mask_BT", "ref_logp_B", "reward_B", "behaviour_logp_BT"):
                assert torch.equal(getattr(part, name)[n * K + j], getattr(batch, name)[group * K + j])


@pytest.mark.parametrize("without", [{}, {"ref_logp_B": None, "ref_logp_BT": None}], ids=["all", "no reference"])
def test_a_batch_comes_to_another_rank_as_it_was(without: dict[str, None]):
    batch = replace(batch_at(1), reference_power=0.3, **without)
    values, numbers = batch_values(batch)
    found = batch_of(values, numbers, torch.device("cpu"))
    for name in Batch.__dataclass_fields__:
        mine, theirs = getattr(found, name), getattr(batch, name)
        assert torch.equal(mine, theirs) if isinstance(theirs, torch.Tensor) else mine == theirs


def test_alone_there_is_nothing_to_share():
    batch = batch_at(1)
    assert ALONE.share(batch).batch is batch and ALONE.most([3]) == [3] and ALONE.total({"loss": 2.0}) == {"loss": 2.0}
