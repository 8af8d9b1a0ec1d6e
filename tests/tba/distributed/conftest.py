"""Learners that are spread over several processes."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.sampled_parameters import sampled
from tests.support.tba.a_rank import begun, led

SHAPES = ["1x2", "1x4", "2x2", "2x1"]
"""How many copies of the weights there are, and how many ranks hold one copy together."""


@pytest.fixture(scope="module", params=sampled(SHAPES, kept=["1x2"]))
def many(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Return a function that makes learners over several processes. This process is the first rank; the other ranks
    follow the newest learner."""
    copies, each = map(int, request.param.split("x"))
    scratch, parts = tmp_path_factory.mktemp("ranks"), tmp_path_factory.mktemp("parts")
    os.environ["GLOO_SOCKET_IFNAME"] = "of-a-cluster"
    with led(copies * each, parts=parts, each=each) as followers:
        yield lambda config, policy, checkpoint=None: begun(followers, config, policy, scratch, checkpoint)
