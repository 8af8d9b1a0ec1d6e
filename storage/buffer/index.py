"""The index of a replay buffer: the light columns of all rows that can be drawn, in memory, and the SQL that draws from
them.

The index is extended by one sync record after the other. A record changes only the prompts that its rows answer. Of
rows with equal content, only the newest in the order (sync, searcher, seq, row) can be drawn, and each prompt has room
for a limited number of rows; see `storage.buffer.drawable_rows`. All other rows stay in the log. The content of the
index follows from the sync records alone, even if it is rebuilt after a restart.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from storage.buffer.branch_queues import BranchQueues, Turns, turns_table
from storage.buffer.drawable_rows import Arrival, DrawableRows
from storage.buffer.sampler import Row, Sampler, Tables
from storage.buffer.settings import Sampling, Training
from storage.log.schema import COLUMNS
from tba.errors import ConfigError, Damaged, RunFailed
from tba.types import Draw, Version


class Index:
    def __init__(
        self,
        sampler_sql: str,
        *,
        seed: int,
        sampling: Sampling,
        training: Training,
        step_of_version: Callable[[Version], int],
        threads: int = 1,
    ):
        self.tables = Tables(threads)
        self.sampler = Sampler(self.tables, sampler_sql)
        self.step_of_version = step_of_version
        self.parameters: dict[str, float] = {
            "seed": seed,
            "slots": training.prompts_per_step,
            "responses": training.responses_per_prompt,
            "recent_share": sampling.recent_share,
            "inv_temp": sampling.inv_temp,
        }
        self.newest: int | None = None  # the newest sync whose record admitted anything
        self.first_recent = 0  # the place in the pool at which the rows of the newest record begin
        self.pool = DrawableRows(sampling.eligibility)
        self.branches = BranchQueues(
            seed=seed, slots=training.prompts_per_step, mean_reward_between=sampling.mean_reward_between
        )
        self.prompts: dict[str, int] = {}  # by prompt_id: a number, in the order in which prompts appeared
        self.versions: dict[Version, int] = {}
        self.shards: dict[str, range] = {}  # by searcher/seq: the places of its rows in the pool

    # --- records in -----------------------------------------------------------------------------------------------

    def check(self, table: pa.Table) -> None:
        """Raise Damaged, with the reason, if the rows of a shard cannot be admitted. A sync record must never admit
        rows that an index cannot hold, because every later attempt would fail on them."""
        try:
            _light(table)
            for version in _versions(table)[0]:
                np.array([self.step_of_version(version)], np.int32)
        except (pa.ArrowException, ValueError, ArithmeticError) as error:
            raise Damaged(f"it does not fit the index ({str(error).splitlines()[0]})") from None

    def extend(self, sync: int, shards: Sequence[tuple[str, pa.Table]], *, step: int) -> None:
        """Admit the shards of a sync record, in order. Each shard is given by its name searcher/seq and a table with at
        least the columns `COLUMNS`. `step` is the gradient step that the sync follows."""
        self._grow_old(step + 1)
        if not shards:
            return
        self.newest, self.first_recent = sync, len(self.pool.rows)
        table = pa.concat_tables([table.select(COLUMNS) for _, table in shards])
        versions_N, prompts_N = self._version_numbers(table), self._prompt_numbers(table)
        arrivals = [_arrival(name, table) for name, table in shards]
        columns = {**_light(table), "prompt": prompts_N, "version": versions_N}
        places = self.pool.extend(sync, arrivals, columns, step=step)
        self.shards.update(zip((name for name, _ in shards), places, strict=True))
        recent = np.unique(prompts_N)
        self.branches.admit(recent, len(self.prompts))
        self.branches.judge(recent, self.pool, self.first_recent)

    def _grow_old(self, step: int) -> None:
        """Exclude the rows that are too old for a gradient step, and so for all later ones, from draws."""
        prompts_P = self.pool.grow_old(step)
        if len(prompts_P):
            self.branches.judge(prompts_P, self.pool, self.first_recent)

    def count_young(self, step: int, arrived: Iterable[pa.Table]) -> int:
        """Return how many rows will be young enough at a gradient step: of the admitted rows, and of the shards
        `arrived`, which are not admitted yet. Copies of rows, and rows for which their prompt has no room, are counted
        too."""
        count = self.pool.count_young(step)
        for table in arrived:
            versions, which_N = _versions(table)
            ages = np.array([step - 1 - self.step_of_version(version) for version in versions])
            count += int((ages <= (self.pool.max_age or 0))[which_N].sum())
        return count

    def _version_numbers(self, table: pa.Table) -> np.ndarray:
        """Return the number of each row's version. New versions get a number."""
        versions, which_N = _versions(table)
        for version in versions:
            if version not in self.versions:
                self.pool.add_version(version, self.step_of_version(version))
                self.versions[version] = len(self.versions)
        return np.array([self.versions[version] for version in versions], np.int32)[which_N]

    def _prompt_numbers(self, table: pa.Table) -> np.ndarray:
        """Return the number of each row's prompt. New prompts get a number."""
        distinct = table["prompt_id"].combine_chunks().dictionary_encode()  # in the order in which they appear
        prompt_ids = distinct.dictionary.to_pylist()
        for prompt_id in prompt_ids:
            if prompt_id not in self.prompts:
                self.pool.prompt_ids.append(prompt_id)
                self.prompts[prompt_id] = len(self.prompts)
        return np.array([self.prompts[prompt_id] for prompt_id in prompt_ids], np.int32)[distinct.indices.to_numpy()]

    # --- draws out ------------------------------------------------------------------------------------------------

    def draw(self, step: int) -> list[Draw]:
        if self.newest is None:
            raise RunFailed(f"step {step}: there is nothing to draw: no record has admitted a trajectory")
        self._grow_old(step)
        turns = self.branches.turns(step)
        if not turns["prioritised"]:
            raise RunFailed(
                f"step {step}: there is nothing to draw: every admitted trajectory is older than sampling.max_age, "
                f"{self.pool.max_age}"
            )
        self._lay(turns)
        share = self.parameters["recent_share"] if turns["recent"] else 0.0
        rows = self.sampler.rows({**self.parameters, "recent_share": share, "step": step, "newest": self.newest})
        draws = self._completed(step, rows)
        self.branches.mark_used((draw.branch, self.prompts[draw.prompt_id]) for draw in draws if draw.position == 0)
        return draws

    def _lay(self, turns: Turns) -> None:
        """Fill the tables that the sampler reads with their content at the gradient step of these turns."""
        tables = {
            "turns": lambda: turns_table(turns, self.pool.prompt_ids),
            "front": lambda: self.pool.table_of(sorted({*turns["recent"], *turns["prioritised"]})),
            "queue": lambda: self.branches.table(self.pool.prompt_ids),
            "pool": self.pool.table,
        }
        for name in self.sampler.reads:
            self.tables.lay(name, tables[name]())

    def _completed(self, step: int, rows: Sequence[Row]) -> list[Draw]:
        """Return the rows of the sampler as draws with ages. Raise ConfigError if the sampler returned a trajectory
        that was never admitted or that belongs to another prompt."""
        places_N = np.array([self._place(step, row) for row in rows], np.int64)
        columns = self.pool.rows.rows_at(places_N, ["prompt", "version"])
        steps = self.pool.versions.rows_at(columns["version"], ["step"])["step"].tolist()
        for row, prompt in zip(rows, columns["prompt"].tolist(), strict=True):
            if self.prompts.get(row.prompt_id) != prompt:
                raise ConfigError(
                    f"sampler SQL: step {step}: trajectory {row.trajectory_id!r} is not of prompt {row.prompt_id!r}"
                )
        return [
            Draw(
                step=step,
                slot=row.slot,
                position=row.position,
                trajectory_id=row.trajectory_id,
                prompt_id=row.prompt_id,
                branch=row.branch,
                weight=row.weight,
                age=step - 1 - version_step,  # relative to the weights that the step starts from
            )
            for row, version_step in zip(rows, steps, strict=True)
        ]

    def _place(self, step: int, row: Row) -> int:
        """Return the place of a trajectory in the pool. Raise ConfigError if no such trajectory was admitted."""
        name, _, number = row.trajectory_id.rpartition("/")
        places = self.shards.get(name, range(0))
        if not number.isdecimal() or int(number) >= len(places):
            raise ConfigError(f"sampler SQL: step {step}: no trajectory {row.trajectory_id!r} was admitted")
        return places[int(number)]

    def queues(self) -> dict[str, Any]:
        """Return which prompts have been drawn since each queue was last refilled."""
        return self.branches.state()

    def restore(self, states: Mapping[str, Any]) -> None:
        """Restore the result of `queues` in an index to which the same sync records were applied."""
        self.branches.restore(states)


def _arrival(name: str, table: pa.Table) -> Arrival:
    searcher, seq = map(int, name.split("/"))
    return Arrival(searcher, seq, rows=len(table))


def _versions(table: pa.Table) -> tuple[list[Version], np.ndarray]:
    """Return the distinct versions of the rows, and for each row the place of its version among them."""
    both_N = [table[name].to_numpy().astype(np.int64) for name in ("version_start", "version_start_attempt")]
    distinct, which_N = np.unique((both_N[0] << 32) + both_N[1], return_inverse=True)
    return [Version(int(code) >> 32, int(code) & 0xFFFFFFFF) for code in distinct], which_N


def _light(table: pa.Table) -> dict[str, np.ndarray]:
    """Return the columns that the pool keeps, except the numbers of prompts, versions and shards."""
    hashes = table["content_hash"].to_pylist()
    content = bytes.fromhex("".join(hashes))  # fromhex skips spaces, so the length is checked
    if {*map(len, hashes)} != {32} or len(content) != 16 * len(table):
        raise ValueError("a content_hash is not an md5 in hexadecimal")
    return {
        "reward": table["reward"].to_numpy(),
        "length": table["length"].to_numpy(),
        "finished": table["finished"].to_numpy(),
        "content": np.frombuffer(content, "V16"),
    }
