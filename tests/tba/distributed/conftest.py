"""Learners that are spread over several processes."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.sampled_parameters import sampled
from tests.support.tba.a_rank import begun, led

SIZES = [2, 4]


@pytest.fixture(scope="module", params=sampled(SIZES, kept=[2]))
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Return a function that makes learners over several processes. This process is the first rank; the other ranks
    follow the newest learner."""
    scratch, parts = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("parts")
    os.environ["GLOO_SOCKET_IFNAME"] = "of-a-cluster"
    with led(request.param, parts=parts) as followers:
        yield lambda config, policy, checkpoint=None: begun(followers, config, policy, scratch, checkpoint)
