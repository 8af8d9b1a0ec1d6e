"""The addresses of the pages of `tba browse`."""

import re
from collections.abc import Mapping
from urllib.parse import quote, urlencode

_LINKED = {
    **dict.fromkeys(("step", "first_step", "last_step", "version_step"), "step"),
    **dict.fromkeys(("version", "version_start", "version_end"), "version"),
    "trajectory_id": "trajectory",
    "prompt_id": "prompt",
}
_TRAJECTORY = re.compile(r"\d+/\d+/\d+")


def step(number: int, attempt: int | None = None) -> str:
    return f"/step/{number}" + ("" if attempt is None else f"?attempt={attempt}")


def version(number: int, attempt: int | None = None) -> str:
    return f"/version/{number}" + ("" if attempt is None else f"/{attempt}")


def trajectory(trajectory_id: str) -> str:
    return f"/trajectory/{quote(trajectory_id)}"


def prompt(prompt_id: str) -> str:
    return with_query("/prompt", {"id": prompt_id})


def sql(query: str) -> str:
    """Return the address of a query's answer. Empty lines of the query are left out."""
    return with_query("/sql", {"query": re.sub(r"\n\s*\n", "\n", query.strip())})


def refresh(to: str) -> str:
    """Return the address that makes the server read the run again and then leads back to the page `to`."""
    return with_query("/refresh", {"to": to})


def with_query(path: str, values: Mapping[str, str]) -> str:
    """Return a path with a query string of those values that are not empty."""
    query = urlencode({name: value for name, value in values.items() if value}, errors="replace")
    return f"{path}?{query}" if query else path


def is_trajectory(text: str) -> bool:
    return _TRAJECTORY.fullmatch(text) is not None


def linked_page(column: str) -> str:
    """Return the kind of page that the values of a column lead to; empty text if there is none."""
    return _LINKED.get(column, "")
