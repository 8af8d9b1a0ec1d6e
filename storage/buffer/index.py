"""The index of a replay buffer: light columns of what can be drawn, in memory, and the SQL that draws from them.

It is extended record by record, and only the prompts that a record brings are touched. In the order (sync, searcher,
seq, row) the newest copy of equal content survives, then what each prompt has room for, as `storage.buffer.index_rows`
says; the log keeps everything. What the index holds follows from the records alone, however they came to be applied.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import md5
from typing import Any

import numpy as np
import pyarrow as pa

from storage.buffer import prompt_queue
from storage.buffer.index_rows import Arrival, Pool
from storage.buffer.prompt_queue import Queue
from storage.buffer.sampler import BRANCHES, Row, Sampler, Tables
from storage.buffer.settings import Sampling, Training
from storage.log.schema import COLUMNS
from tba.errors import ConfigError, Damaged, RunFailed
from tba.types import Branch, Draw, Version


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
        self.seed, self.slots, self.step_of_version = seed, training.prompts_per_step, step_of_version
        self.parameters: dict[str, float] = {
            "seed": seed,
            "slots": training.prompts_per_step,
            "responses": training.responses_per_prompt,
            "recent_share": sampling.recent_share,
            "inv_temp": sampling.inv_temp,
        }
        self.newest: int | None = None  # the newest record that admitted anything
        self.first_recent = 0  # where its rows begin in the pool
        self.pool = Pool(sampling.eligibility)
        self.mean_reward_between = sampling.mean_reward_between
        self.prompts: dict[str, int] = {}  # their numbers, in the order in which they appeared
        self.versions: dict[Version, int] = {}
        self.shards: dict[str, range] = {}  # by searcher/seq: where their rows lie in the pool
        self.branches: dict[Branch, Queue] = {branch: Queue() for branch in BRANCHES}

    # --- records in -----------------------------------------------------------------------------------------------

    def check(self, table: pa.Table) -> None:
        """Prove that the rows of a shard can be admitted. Damaged says why not: no record may admit what an index
        cannot hold, since it would be in the way of every later attempt."""
        try:
            _light(table)
            for version in _versions(table)[0]:
                np.array([self.step_of_version(version)], np.int32)
        except (pa.ArrowException, ValueError, ArithmeticError) as error:
            raise Damaged(f"it does not fit the index ({str(error).splitlines()[0]})") from None

    def extend(self, sync: int, shards: Sequence[tuple[str, pa.Table]], *, step: int) -> None:
        """Admit the shards of a record, which follows a step, each named searcher/seq and given with at least
        `COLUMNS`, in order."""
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
        self.branches["prioritised"].add(np.arange(len(self.branches["prioritised"].prompts_P), len(self.prompts)))
        self.branches["recent"] = Queue()
        self.branches["recent"].add(np.unique(prompts_N))
        self._judge(np.unique(prompts_N))

    def _grow_old(self, step: int) -> None:
        """What is too old for a step, and so for all that follow, is drawn no more."""
        prompts_P = self.pool.grow_old(step)
        if len(prompts_P):
            self._judge(prompts_P)

    def _judge(self, prompts_P: np.ndarray) -> None:
        """Of these prompts, which have changed: of which there is nothing to draw now, and which are too easy or too
        hard."""
        if self.pool.max_age is not None:
            newest_P = self.pool.newest_places(prompts_P.tolist())
            self.branches["prioritised"].pass_over(prompts_P, newest_P < 0)
            self.branches["recent"].pass_over(prompts_P, newest_P < self.first_recent)
        if self.mean_reward_between is not None:
            low, high = self.mean_reward_between
            outside_P = np.array([not low < mean < high for mean in self.pool.mean_rewards(prompts_P.tolist())])
            for queue in self.branches.values():
                queue.hold_back(prompts_P, outside_P)

    def count_young(self, step: int, arrived: Iterable[pa.Table]) -> int:
        """Of what was admitted and of what has arrived, the rows of which the age at a step will be within the bound,
        whether or not they are copies, or a prompt has room for them."""
        found = self.pool.count_young(step)
        for table in arrived:
            versions, which_N = _versions(table)
            ages = np.array([step - 1 - self.step_of_version(version) for version in versions])
            found += int((ages <= (self.pool.max_age or 0))[which_N].sum())
        return found

    def _version_numbers(self, table: pa.Table) -> np.ndarray:
        """Of the rows; versions that have none yet get one."""
        versions, which_N = _versions(table)
        for version in versions:
            if version not in self.versions:
                self.pool.add_version(version, self.step_of_version(version))
                self.versions[version] = len(self.versions)
        return np.array([self.versions[version] for version in versions], np.int32)[which_N]

    def _prompt_numbers(self, table: pa.Table) -> np.ndarray:
        """Of the rows; prompts that have none yet get one."""
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
            raise RunFailed(f"step {step}: there is nothing to draw, no record has admitted a trajectory")
        self._grow_old(step)
        turns: dict[Branch, list[int]] = {branch: self._turns(step, branch) for branch in BRANCHES}
        if not turns["prioritised"]:
            raise RunFailed(
                f"step {step}: nothing that records have admitted is as young as sampling.max_age "
                f"({self.pool.max_age}) wants it"
            )
        self._lay(turns)
        share = self.parameters["recent_share"] if turns["recent"] else 0.0
        rows = self.sampler.rows({**self.parameters, "recent_share": share, "step": step, "newest": self.newest})
        draws = self._completed(step, rows)
        for branch, queue in self.branches.items():
            drawn = (draw.prompt_id for draw in draws if draw.position == 0 and draw.branch == branch)
            queue.take([self.prompts[prompt_id] for prompt_id in drawn])
        return draws

    def _lay(self, turns: Mapping[Branch, Sequence[int]]) -> None:
        """What the sampler reads, as it is at the step of these turns."""
        tables = {
            "turns": lambda: self._turns_table(turns),
            "front": lambda: self.pool.table_of(sorted({*turns["recent"], *turns["prioritised"]})),
            "queue": self._queue_table,
            "pool": self.pool.table,
        }
        for name in self.sampler.reads:
            self.tables.lay(name, tables[name]())

    def _turns(self, step: int, branch: Branch) -> list[int]:
        def uniform(turn: int) -> float:
            digits = md5(f"{self.seed}:prompt:{step}:{branch}:{turn}".encode(), usedforsecurity=False).hexdigest()[:13]
            return (int(digits, 16) + 0.5) / 2**52

        return self.branches[branch].turns(self.slots, uniform)

    def _turns_table(self, turns: Mapping[Branch, Sequence[int]]) -> pa.Table:
        rows = [(branch, turn, prompt) for branch in BRANCHES for turn, prompt in enumerate(turns[branch])]
        return pa.table(
            {
                "branch": [branch for branch, _, _ in rows],
                "turn": [turn for _, turn, _ in rows],
                "prompt_id": [self.pool.prompt_ids[prompt] for _, _, prompt in rows],
                "prompt": [prompt for _, _, prompt in rows],
            }
        )

    def _queue_table(self) -> pa.Table:
        names = pa.array(self.pool.prompt_ids, pa.string())
        return pa.concat_tables(
            pa.table(
                {
                    "branch": pa.array([branch]).take(pa.array(np.zeros(len(prompts), np.int32))),
                    "prompt_id": names.take(pa.array(prompts)),
                    "prompt": prompts,
                    "used": queue.used_P[queue.open_P],
                }
            )
            for branch, queue in self.branches.items()
            for prompts in [queue.prompts_P[queue.open_P]]
        )

    def _completed(self, step: int, rows: Sequence[Row]) -> list[Draw]:
        """With their ages. A row that was never admitted, or of another prompt, is the sampler's mistake."""
        places_N = np.array([self._place(step, row) for row in rows], np.int64)
        found = self.pool.rows.take(places_N, ["prompt", "version"])
        steps = self.pool.versions.take(found["version"], ["step"])["step"].tolist()
        for row, prompt in zip(rows, found["prompt"].tolist(), strict=True):
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
                age=step - 1 - version_step,  # of the weights that the step starts from
            )
            for row, version_step in zip(rows, steps, strict=True)
        ]

    def _place(self, step: int, row: Row) -> int:
        """Where a trajectory lies in the pool."""
        name, _, number = row.trajectory_id.rpartition("/")
        places = self.shards.get(name, range(0))
        if not number.isdecimal() or int(number) >= len(places):
            raise ConfigError(f"sampler SQL: step {step}: no trajectory {row.trajectory_id!r} was admitted")
        return places[int(number)]

    def queues(self) -> dict[str, Any]:
        """Which prompts have been drawn since each queue was last refilled."""
        return {branch: queue.state() for branch, queue in self.branches.items()}

    def restore(self, states: Mapping[str, Any]) -> None:
        """The queues as `queues` once gave them after the same records."""
        prompt_queue.restore(self.branches, states)


def _arrival(name: str, table: pa.Table) -> Arrival:
    searcher, seq = map(int, name.split("/"))
    return Arrival(searcher, seq, rows=len(table))


def _versions(table: pa.Table) -> tuple[list[Version], np.ndarray]:
    """The distinct versions of the rows, and which of them each row has."""
    both_N = [table[name].to_numpy().astype(np.int64) for name in ("version_start", "version_start_attempt")]
    distinct, which_N = np.unique((both_N[0] << 32) + both_N[1], return_inverse=True)
    return [Version(int(it) >> 32, int(it) & 0xFFFFFFFF) for it in distinct], which_N


def _light(table: pa.Table) -> dict[str, np.ndarray]:
    """What the pool keeps of the rows, but for numbers of what they refer to."""
    hashes = table["content_hash"].to_pylist()
    content = bytes.fromhex("".join(hashes))  # which passes over spaces
    if {*map(len, hashes)} != {32} or len(content) != 16 * len(table):
        raise ValueError("a content_hash is not an md5 in hexadecimal")
    return {
        "reward": table["reward"].to_numpy(),
        "length": table["length"].to_numpy(),
        "finished": table["finished"].to_numpy(),
        "content": np.frombuffer(content, "V16"),
    }
