"""Indexes without a store, and replay buffers, for tests of draws."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Self

from storage.buffer.index import Index
from storage.buffer.replay_buffer import DuckReplayBuffer
from storage.buffer.sampler import default_sampler
from storage.log.schema import to_table
from storage.runs.events import Events
from storage.runs.run import Run
from tba.types import Copies, Draw, Eligibility, Evict, Trajectory, Version
from tests.support.storage.oracle import Row


def make_eligibility(
    capacity: int = 100, evict: Evict = "oldest", copies: Copies = "newest", max_age: int | None = None
) -> Eligibility:
    return Eligibility(capacity=capacity, evict=evict, copies=copies, max_age=max_age)


ANY = make_eligibility()  # with capacity for everything that a test stores


@dataclass(frozen=True, kw_only=True)
class Sections:
    """All sections of the settings that a buffer reads, in one object. Allows values that no real run could have."""

    prompts_per_step: int
    responses_per_prompt: int
    seed: int = 0
    recent_share: float = 0.5
    inv_temp: float = 0.0
    eligibility: Eligibility = ANY
    mean_reward_between: tuple[float, float] | None = None
    memory_gb: float = 2.0
    disk_gb: float = 32.0
    draw_threads: int = 1
    needs_tokens: bool = False
    needs_reference: bool = False
    needs_values: bool = False

    @property
    def section(self) -> Self:
        return self

    sampling = training = limits = objective = section


def make_buffer(
    run: Run,
    sections: Sections,
    *,
    sampler_sql: str = "",
    attempt: int = 1,
    searchers_in_step: int | None = None,
) -> DuckReplayBuffer:
    return DuckReplayBuffer(
        run,
        sections,
        sampler_sql=sampler_sql or default_sampler(),
        attempt=attempt,
        events=Events(run, "trainer", attempt),
        searchers_in_step=searchers_in_step,
    )


def make_index(
    *,
    seed: int = 0,
    slots: int = 4,
    responses: int = 2,
    recent_share: float = 0.5,
    inv_temp: float = 0.0,
    capacity: int = 100,
    evict: Evict = "oldest",
    copies: Copies = "newest",
    max_age: int | None = None,
    mean_reward_between: tuple[float, float] | None = None,
    step_of_version: Callable[[Version], int] = lambda version: version.number,
    threads: int = 1,
    sampler_sql: str | None = None,
) -> Index:
    sections = Sections(
        prompts_per_step=slots,
        responses_per_prompt=responses,
        recent_share=recent_share,
        inv_temp=inv_temp,
        eligibility=make_eligibility(capacity, evict, copies, max_age),
        mean_reward_between=mean_reward_between,
    )
    return Index(
        sampler_sql or default_sampler(),
        seed=seed,
        sampling=sections,
        training=sections,
        step_of_version=step_of_version,
        threads=threads,
    )


def admit(index: Index, sync: int, *shards: Sequence[Trajectory], step: int = 0) -> None:
    """Admit these shards by a record after a step. Searcher and round of a shard are those of its first trajectory."""
    named = sorted(((shard[0].searcher, shard[0].round), shard) for shard in shards)
    index.extend(
        sync,
        [
            (f"{searcher}/{seq}", to_table(shard, run="r", searcher=searcher, seq=seq))
            for (searcher, seq), shard in named
        ],
        step=step,
    )


def oracle_rows(shard: Sequence[Trajectory], *, k: int = 0) -> list[Row]:
    """Return the rows of a shard for the oracle. Version n follows step n x k."""
    table = to_table(shard, run="r", searcher=shard[0].searcher, seq=shard[0].round)
    names = ("trajectory_id", "prompt_id", "content_hash", "reward", "version_start")
    *columns, versions = (table[name].to_pylist() for name in names)
    return [Row(*row, version * k) for *row, version in zip(*columns, versions, strict=True)]


def drawable(index: Index) -> list[str]:
    """Return the ids of all trajectories that can be drawn, oldest first."""
    index.tables.lay("pool", index.pool.table())
    return [row[0] for row in index.tables.con.execute("select trajectory_id from pool order by ord").fetchall()]


def used(index: Index) -> dict[str, set[str]]:
    """Return by branch the prompts drawn since its queue was last refilled."""
    return {
        branch: {index.pool.prompt_ids[prompt] for prompt in queue.prompts_P[queue.used_P]}
        for branch, queue in index.branches.by_branch.items()
    }


def prompts(draws: Sequence[Draw]) -> list[str]:
    """Return the prompt of each slot."""
    return [draw.prompt_id for draw in draws if draw.position == 0]
