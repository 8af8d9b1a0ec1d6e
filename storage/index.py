"""The index of a replay buffer: light columns of what can be drawn, in DuckDB's memory.

It is extended record by record, and only the prompts that a record brings are touched. In the order (sync, searcher,
seq, row) the newest copy of equal content survives, then the newest `capacity` rows of each prompt; the log keeps
everything. What the index holds follows from the records alone, however they came to be applied.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import duckdb
import numpy as np
import pyarrow as pa

from storage.sampler import BRANCHES, Row, Sampler, connect
from tba.errors import ConfigError, Damaged, RunFailed
from tba.types import Draw, Version

COLUMNS = (
    "trajectory_id", "prompt_id", "content_hash", "reward", "length", "finished", "version_start",
    "version_start_attempt",
)  # fmt: skip
"""Of a shard, what the index is made from."""

_INSERT = """
insert into pool by name
select
  trajectory_id,
  split_part(trajectory_id, '/', 1)::integer as searcher,
  split_part(trajectory_id, '/', 2)::integer as seq,
  split_part(trajectory_id, '/', 3)::integer as row,
  content_hash::uuid as content,
  $sync as sync,
  ord, prompt, prompt_id, reward, length, finished, version_start, version_start_attempt, version_step
from arriving
"""

_REMOVE = """
with
  touched as (select ord, prompt, content from pool where prompt in (select prompt from arriving)),
  newest_copies as (select prompt, max(ord) as ord from touched group by prompt, content),
  surviving as (
    select ord from newest_copies qualify row_number() over (partition by prompt order by ord desc) <= $capacity
  )
delete from pool where ord in (select ord from touched where ord not in (select ord from surviving))
"""

_QUEUE_NEW = """
insert into queue by name
select 'prioritised' as branch, any_value(prompt_id) as prompt_id, prompt, false as used
from arriving where prompt >= $known group by prompt
"""

_QUEUE_RECENT = """
delete from queue where branch = 'recent';
insert into queue by name
select 'recent' as branch, any_value(prompt_id) as prompt_id, prompt, false as used from arriving group by prompt
"""

_USE = "update queue set used = true where branch = $branch and prompt in (select unnest($prompts))"
_REFILL = "update queue set used = prompt in (select unnest($prompts)) where branch = $branch"


class _Rows(NamedTuple):
    """Of one shard, what a drawn row is checked against and completed with."""

    prompt_B: np.ndarray
    version_step_B: np.ndarray


class Index:
    def __init__(
        self,
        sampler_sql: str,
        *,
        seed: int,
        slots: int,
        responses: int,
        recent_share: float,
        inv_temp: float,
        capacity: int,
        step_of_version: Callable[[Version], int],
        threads: int = 1,
    ):
        self.con = connect(threads)
        self.sampler = Sampler(self.con, sampler_sql)
        self.capacity, self.step_of_version = capacity, step_of_version
        self.parameters: dict[str, float] = {
            "seed": seed,
            "slots": slots,
            "responses": responses,
            "recent_share": recent_share,
            "inv_temp": inv_temp,
        }
        self.newest: int | None = None  # the newest record that admitted anything
        self.admitted = 0
        self.numbers: dict[str, int] = {}  # of prompts, in the order in which they appeared
        self.rows: dict[str, _Rows] = {}  # by searcher/seq
        self.used: dict[str, set[str]] = {branch: set() for branch in BRANCHES}

    # --- records in -----------------------------------------------------------------------------------------------

    def check(self, table: pa.Table) -> None:
        """Prove that the rows of a shard can be admitted, by doing so and undoing it. Damaged says why not: no record
        may admit what an index cannot hold, since it would be in the way of every later attempt."""
        self.con.begin()
        try:
            self._insert(0, self._completed(table.select(COLUMNS), {}))
        except (duckdb.Error, pa.ArrowException, ValueError, ArithmeticError) as error:
            raise Damaged(f"it does not fit the index ({str(error).splitlines()[0]})") from None
        finally:
            self.con.rollback()

    def extend(self, sync: int, shards: Sequence[tuple[str, pa.Table]]) -> None:
        """Admit the shards of a record, each named searcher/seq and given with at least `COLUMNS`, in order."""
        if not shards:
            return
        known = len(self.numbers)
        arriving = self._completed(pa.concat_tables([table.select(COLUMNS) for _, table in shards]), self.numbers)
        start = 0
        for name, table in shards:
            part = arriving.slice(start, len(table))
            self.rows[name] = _Rows(part["prompt"].to_numpy(), part["version_step"].to_numpy())
            start += len(table)
        self._store(sync, arriving, known)
        self.newest, self.used["recent"] = sync, set()
        self.admitted += len(arriving)

    def _completed(self, table: pa.Table, known: dict[str, int]) -> pa.Table:
        """With its place in the order of all rows, the number of its prompt, and the step of its version. Prompts
        that have no number yet get one in `known`."""
        numbers = [known.setdefault(it, len(known)) for it in table["prompt_id"].to_pylist()]
        versions = zip(table["version_start"].to_pylist(), table["version_start_attempt"].to_pylist(), strict=True)
        versions_B = [Version(*version) for version in versions]
        steps = {version: self.step_of_version(version) for version in set(versions_B)}
        return (
            table.append_column("ord", pa.array(range(self.admitted, self.admitted + len(table)), pa.int64()))
            .append_column("prompt", pa.array(numbers, pa.int32()))
            .append_column("version_step", pa.array([steps[version] for version in versions_B], pa.int32()))
        )

    def _store(self, sync: int, arriving: pa.Table, known: int) -> None:
        self._insert(sync, arriving)
        self.con.register("arriving", arriving)
        self.con.execute(_REMOVE, {"capacity": self.capacity})
        self.con.execute(_QUEUE_NEW, {"known": known})
        self.con.execute(_QUEUE_RECENT)
        self.con.unregister("arriving")

    def _insert(self, sync: int, arriving: pa.Table) -> None:
        self.con.register("arriving", arriving)
        self.con.execute(_INSERT, {"sync": sync})
        self.con.unregister("arriving")

    # --- draws out ------------------------------------------------------------------------------------------------

    def draw(self, step: int) -> list[Draw]:
        if self.newest is None:
            raise RunFailed(f"step {step}: there is nothing to draw, no record has admitted a trajectory")
        rows = self.sampler.rows({**self.parameters, "step": step, "newest": self.newest})
        draws = [self._completed_draw(step, row) for row in rows]
        self._mark(draws)
        return draws

    def _completed_draw(self, step: int, row: Row) -> Draw:
        """With its age. A row that was never admitted, or of another prompt, is the sampler's mistake."""
        shard, _, place = row.trajectory_id.rpartition("/")
        rows = self.rows.get(shard)
        if rows is None or not place.isdecimal() or int(place) >= len(rows.prompt_B):
            raise ConfigError(f"sampler SQL: step {step}: no trajectory {row.trajectory_id!r} was admitted")
        if self.numbers.get(row.prompt_id) != rows.prompt_B[int(place)]:
            raise ConfigError(
                f"sampler SQL: step {step}: trajectory {row.trajectory_id!r} is not of prompt {row.prompt_id!r}"
            )
        return Draw(
            step=step,
            slot=row.slot,
            position=row.position,
            trajectory_id=row.trajectory_id,
            prompt_id=row.prompt_id,
            branch=row.branch,
            weight=row.weight,
            age=step - 1 - int(rows.version_step_B[int(place)]),  # of the weights that the step starts from
        )

    def _mark(self, draws: Sequence[Draw]) -> None:
        """The drawn prompts leave their queues. One that had left already shows that its queue was refilled."""
        for branch in BRANCHES:
            used, refilled = self.used[branch], False
            drawn = [draw.prompt_id for draw in draws if draw.position == 0 and draw.branch == branch]
            for prompt_id in drawn:
                if prompt_id in used:
                    used.clear()
                    refilled = True
                used.add(prompt_id)
            self._set_used(branch, used if refilled else drawn, _REFILL if refilled else _USE)

    def queues(self) -> dict[str, list[str]]:
        """The prompts that have been drawn since each queue was last refilled."""
        return {branch: sorted(used) for branch, used in self.used.items()}

    def restore(self, queues: Mapping[str, Sequence[str]]) -> None:
        """The queues as `queues` once gave them."""
        for branch in BRANCHES:
            used = set(queues.get(branch, ()))
            unknown = used - self.numbers.keys()
            if unknown:
                raise Damaged(f"queue {branch!r} names prompt {min(unknown)!r}, which no record admits")
            self.used[branch] = used
            self._set_used(branch, used, _REFILL)

    def _set_used(self, branch: str, prompt_ids: Sequence[str] | set[str], statement: str) -> None:
        numbers = [self.numbers[prompt_id] for prompt_id in prompt_ids]
        if numbers or statement == _REFILL:
            self.con.execute(statement, {"branch": branch, "prompts": numbers})
