"""Trajectories with values of their steps."""

from typing import Any

from hypothesis import strategies as st

LOGPS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def steps(draw: st.DrawFn, length: int) -> dict[str, Any]:
    """Draw the steps of a response: none, or the ends of its steps with a value before each step."""
    if not length or draw(st.booleans()):
        return {}
    ends = (*sorted(draw(st.sets(st.integers(1, length), max_size=length - 1)) - {length}), length)
    return {"step_ends": ends, "step_values": tuple(draw(st.lists(LOGPS, min_size=len(ends), max_size=len(ends))))}
