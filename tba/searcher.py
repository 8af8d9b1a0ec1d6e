"""A searcher finds: it adopts the newest version, takes prompts, generates, scores and appends, round after round."""

import hashlib
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count

from tba.config import SearchConfig
from tba.errors import Damaged, DeadlinePassed
from tba.interfaces import EventLog, Generator, Lease, ReferenceScorer, Task, TrajectoryLog, VersionStore
from tba.timing import timed
from tba.types import Prompt, Response, Trajectory, Version


class PromptStream:
    """Which prompts a round visits: a function of seed, searcher and round alone, so a restart changes nothing.

    All searchers walk one endless sequence of seeded permutations of the prompts; searcher i of N takes every N-th
    place of it, so that together they visit each prompt once per pass.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int, searcher: int, searchers: int, shuffle: bool):
        self.prompts, self.seed, self.shuffle = prompts, seed, shuffle
        self.searcher, self.searchers = searcher % searchers, searchers
        self.orders: dict[int, list[int]] = {}

    def take(self, round: int, size: int) -> list[Prompt]:
        size = min(size, len(self.prompts))
        first = round * size
        return [self._at(place * self.searchers + self.searcher) for place in range(first, first + size)]

    def _at(self, place: int) -> Prompt:
        epoch, offset = divmod(place, len(self.prompts))
        if epoch not in self.orders:
            self.orders = {e: order for e, order in self.orders.items() if e >= epoch - 1}
            self.orders[epoch] = self._order(epoch)
        return self.prompts[self.orders[epoch][offset]]

    def _order(self, epoch: int) -> list[int]:
        indices = range(len(self.prompts))
        if not self.shuffle:
            return list(indices)
        return sorted(indices, key=lambda i: hashlib.md5(f"{self.seed}:prompts:{epoch}:{i}".encode()).digest())


def request_seed(seed: int, searcher: int, round: int, slot: int) -> int:
    """The seed of one response: 63 bits, so that it fits a signed column."""
    digest = hashlib.md5(f"{seed}:response:{searcher}:{round}:{slot}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


class Searcher:
    def __init__(
        self,
        index: int,
        *,
        seed: int,
        config: SearchConfig,
        stream: PromptStream,
        task: Task,
        generator: Generator,
        scorer: ReferenceScorer,
        log: TrajectoryLog,
        versions: VersionStore,
        lease: Lease,
        events: EventLog,
    ):
        self.index, self.seed, self.config, self.stream = index, seed, config, stream
        self.task, self.generator, self.scorer = task, generator, scorer
        self.log, self.versions, self.lease, self.events = log, versions, lease, events
        self.version: Version | None = None
        self.seconds: dict[str, float] = {}
        self.trajectories = 0
        self.tokens = 0

    def run(self) -> None:
        """Consumes versions; produces one shard a round. Never waits: version 0 exists before a searcher is built,
        and prompts never run out. Ends when the lease says so."""
        for round in count(self.log.next_round(self.index)):
            self.lease.check()
            self.adopt_newest()
            prompts = self.stream.take(round, self.config.prompts_per_round)
            responses = self.generate(round, prompts)
            trajectories = self.score(round, prompts, responses)
            self.append(round, trajectories)

    def adopt_newest(self) -> None:
        """Take the newest version if it is another one; a version that cannot be loaded is reported and passed over."""
        with timed(self.seconds, "adopt"):
            newest = self.versions.newest()
            if newest is None or newest == self.version:
                return
            try:
                self.generator.adopt(self.versions.load(newest), newest)
            except FileNotFoundError:  # pruned while it was being read: a newer one is there
                return
            except Damaged as error:
                if self.version is None:
                    raise
                self.events.write("version-refused", str(error), severity="error", version=str(newest))
                return
            self.version = newest

    def generate(self, round: int, prompts: Sequence[Prompt]) -> list[list[Response]]:
        samples = self.config.responses_per_prompt
        seeds = [
            [request_seed(self.seed, self.index, round, i * samples + j) for j in range(samples)]
            for i in range(len(prompts))
        ]
        with timed(self.seconds, "generate"):
            return self.generator.generate(prompts, seeds, temperature=self.config.temperature, top_p=self.config.top_p)

    def score(self, round: int, prompts: Sequence[Prompt], responses: Sequence[Sequence[Response]]) -> list[Trajectory]:
        """Rewards and reference log-probabilities of a round's responses."""
        with timed(self.seconds, "score"):
            ref_logps = self.scorer.token_logps(prompts, responses, temperature=self.config.temperature)
            now = datetime.now(UTC)
            samples = self.config.responses_per_prompt
            return [
                self._trajectory(round, i * samples + j, prompt, response, ref_logps[i][j], now)
                for i, prompt in enumerate(prompts)
                for j, response in enumerate(responses[i])
            ]

    def append(self, round: int, trajectories: Sequence[Trajectory]) -> None:
        with timed(self.seconds, "append"):
            self.log.append(self.index, round, trajectories)
        self.trajectories += len(trajectories)
        self.tokens += sum(t.length for t in trajectories)
        mean_reward = sum(t.reward for t in trajectories) / len(trajectories)
        self.lease.tell(
            f"round {round} with version {self.version}",
            round=round,
            trajectories=self.trajectories,
            tokens=self.tokens,
            reward_mean=mean_reward,
            **{f"seconds_{part}": seconds for part, seconds in self.seconds.items()},
        )

    def _trajectory(
        self,
        round: int,
        slot: int,
        prompt: Prompt,
        response: Response,
        ref_logps: tuple[float, ...],
        now: datetime,
    ) -> Trajectory:
        reward = self.task.reward(prompt, response)
        return Trajectory(
            searcher=self.index,
            round=round,
            slot=slot,
            version_start=response.version_start,
            version_end=response.version_end,
            prompt_id=prompt.prompt_id,
            group_id=f"{self.index}/{round}/{prompt.prompt_id}",
            prompt=prompt.text,
            response=response.text,
            prompt_tokens=prompt.tokens,
            response_tokens=response.tokens,
            behaviour_logps=response.logps,
            ref_logps=ref_logps,
            reference_version=self.scorer.version,
            reward=reward.value,
            reward_parts=reward.parts,
            finished=response.finished,
            temperature=response.temperature,
            top_p=response.top_p,
            seed=response.seed,
            created_at=now,
            generate_seconds=response.generate_seconds,
        )


def await_reference(versions: VersionStore, lease: Lease, *, deadline: float, poll: float = 0.5) -> Version:
    """The policy before training, once the trainer has published it."""
    began = time.monotonic()
    while True:
        lease.check()
        if version := versions.reference():
            return version
        waited = time.monotonic() - began
        if waited > deadline:
            raise DeadlinePassed(f"no version 0 after {waited:.0f} s (limits.data_deadline): is the trainer alive?")
        lease.tell(f"waiting {waited:.0f} s for version 0", seconds_wait=waited)
        time.sleep(poll)
