"""Builders of small objects. Everything has a default, so a test names only what matters to it."""

import dataclasses
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from storage.log.schema import VERSIONS
from tba.fetched import Fetched, Lists
from tba.types import Example, Prompt, Response, Trajectory, Version

NOON = datetime(2026, 1, 2, 12, 0, 0, 345678, tzinfo=UTC)


def make_prompt(prompt_id: str = "train/0", **changes: Any) -> Prompt:
    fields: dict[str, Any] = {"text": "1+2=", "tokens": (1, 5, 2, 6), "answer": "3", "metadata": {"digits": 1}}
    return Prompt(prompt_id=prompt_id, **{**fields, **changes})


def make_trajectory(
    prompt_id: str = "train/0",
    *,
    tokens: Sequence[int] = (7, 8, 2),
    reward: float = 1.0,
    version: int = 0,
    searcher: int = 0,
    round: int = 0,
    slot: int = 0,
    **changes: Any,
) -> Trajectory:
    """Make a trajectory. Equal `prompt_id` and `tokens` make equal content."""
    fields: dict[str, Any] = {
        "searcher": searcher,
        "round": round,
        "slot": slot,
        "version_start": Version(version, 1),
        "version_end": Version(version, 1),
        "prompt_id": prompt_id,
        "group_id": f"{searcher}/{round}/{prompt_id}",
        "prompt": "1+2=",
        "response": "3",
        "prompt_tokens": (1, 5, 2, 6),
        "response_tokens": tuple(tokens),
        "behaviour_logps": (-0.5,) * len(tokens),
        "ref_logps": (-0.25,) * len(tokens),
        "reference_version": Version(0, 1),
        "reward": reward,
        "reward_parts": {"correct": reward},
        "finished": True,
        "temperature": 0.7,
        "top_p": 1.0,
        "seed": 2**63 - 1,
        "created_at": NOON,
        "generate_seconds": 0.01,
    }
    return Trajectory(**{**fields, **changes})


def make_shard(
    rewards: Mapping[str, Sequence[float]], *, searcher: int = 0, round: int = 0, **changes: Any
) -> list[Trajectory]:
    """Make a round of a searcher: one response per reward of each prompt. All responses differ, also between rounds."""
    pairs = [(prompt_id, reward) for prompt_id, given in rewards.items() for reward in given]
    return [
        make_trajectory(
            prompt_id, tokens=(searcher, round, slot, 2), reward=reward, searcher=searcher, round=round, slot=slot,
            **changes,
        )
        for slot, (prompt_id, reward) in enumerate(pairs)
    ]  # fmt: skip


def make_example(version: Version, prompt_id: str = "test/0", **changes: Any) -> Example:
    fields: dict[str, Any] = {"step": 0, "prompt": "1+2=", "response": "3", "answer": "3", "reward": 1.0}
    return Example(version=version, prompt_id=prompt_id, **{**fields, **changes})


def as_stored(shard: Sequence[Trajectory]) -> dict[str, Trajectory]:
    """Return the trajectories of one append, by the ids that they get."""
    ordered = sorted(shard, key=lambda t: (t.prompt_id, t.slot))
    named = {f"{t.searcher}/{t.round}/{row}": t for row, t in enumerate(ordered)}
    return {name: dataclasses.replace(t, trajectory_id=name) for name, t in named.items()}


def from_table(table: pa.Table) -> list[Trajectory]:
    """Return the trajectories of a table, with the ids under which they are stored."""
    return [_from_row(row) for row in table.to_pylist()]


def _from_row(row: Mapping[str, Any]) -> Trajectory:
    fields = {field.name: row[field.name] for field in dataclasses.fields(Trajectory)}
    fields |= {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    fields |= {name: Version(row[name], row[f"{name}_attempt"]) for name in VERSIONS}
    return Trajectory(**fields | {"reward_parts": dict(row["reward_parts"])})


def rows_of(fetched: Fetched) -> list[tuple]:
    """Return fetched rows as tuples that can be compared."""
    lists = (fetched.prompt_tokens, fetched.response_tokens, fetched.ref_logps, *filter(None, [fetched.loss_mask]))
    columns = [rows_in(it) for it in lists]
    scalars = (fetched.trajectory_ids, fetched.prompt_ids, fetched.reward_B.tolist(), fetched.finished_B.tolist())
    return [(*row, *of_lists) for *row, of_lists in zip(*scalars, zip(*columns, strict=True), strict=True)]


def rows_in(lists: Lists | None) -> list[tuple]:
    """Return the list of each row."""
    assert lists is not None
    ends = zip(np.cumsum(lists.lengths_B).tolist(), lists.lengths_B.tolist(), strict=True)
    return [tuple(lists.elements_N[end - length : end].tolist()) for end, length in ends]


def tokens_of(groups: list[list[Response]]) -> list[list[tuple[int, ...]]]:
    return [[response.tokens for response in group] for group in groups]
