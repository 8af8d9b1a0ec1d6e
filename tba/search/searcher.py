"""A searcher finds: it adopts the newest version, takes prompts, generates, scores and appends, round after round."""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from random import Random

from tba.config import SearchConfig
from tba.errors import Busy, Damaged, DeadlinePassed
from tba.interfaces import EventLog, Generator, Lease, ReadsAhead, ReferenceScorer, Task, TrajectoryLog, VersionStore
from tba.runtime.waiting import looks, timed
from tba.search import turns, values
from tba.search.prompt_stream import PromptStream
from tba.search.rounds import Group, Rounds
from tba.search.scoring import Scoring
from tba.search.values import Steps
from tba.search.version_watcher import Lookout
from tba.seeds import request_seed
from tba.types import Asked, Prompt, Request, Response, Reward, Trajectory, Version

LOOK_EVERY = 1.0  # seconds between looks for a version while responses are in flight
SHARDS_PER_ROUND = 4
"""How many of the newest shards are looked through for each round that may be open. While the newest of them were asked
no more than twice as many were stored, in full shards and at most as many that were cut short."""


class Searcher:
    """Rounds are begun as long as there is room for another (`search.open_rounds`), with the newest version. Where
    responses are finished by the version that began them, no round is begun while a newer version waits for them.
    Versions are looked for and fetched beside all that: only to take one it stands still."""

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
        deadline: float,
        lag: int | None = None,
        first_version: int = 0,
        updates_in_flight: bool = False,
    ):
        values.check_can_value(task, config)
        self.index, self.seed, self.config, self.stream = index, seed, config, stream
        self.scoring = Scoring(task, remember=config.remembered_rewards)
        self.generator, self.scorer = generator, scorer
        self.answers = turns.whole(task, generator)
        self.log, self.versions, self.lease, self.events = log, versions, lease, events
        self.deadline = deadline  # for each version that has to be waited for
        self.lag = lag  # in syncs, where it goes in step with the trainer
        self.first_version = first_version  # that rounds can be by: where a fork begins
        self.updates_in_flight = updates_in_flight  # adopts while it generates
        self.lookout = Lookout(versions, generator.read_ahead if isinstance(generator, ReadsAhead) else None)
        self.looked = 0.0  # when a look was begun last
        self.version: Version | None = None
        self.fetched: tuple[Version, Path] | None = None  # waits for what is in flight to end
        self.refused: Version | None = None  # the newest one found damaged: it is not fetched again
        self.begun = 0  # rounds, with this version
        self.rounds = Rounds(stream, config)
        self.in_flight: dict[Request, tuple[Group, int]] = {}  # with the slot
        self.ended: list[Group] = []  # not stored yet, in the order in which they ended
        self.seq = 0
        self.seconds: dict[str, float] = {}
        self.round = 0
        self.trajectories = 0
        self.tokens = 0

    def run(self) -> None:
        """Consumes versions; produces shards. Waits for a first version that can be loaded, and never again unless it
        goes in step with the trainer or the rounds of a version are bounded: prompts do not run out. Ends when the
        lease says so."""
        with closing(self.lookout):
            if self.lag is None:
                self.adopt_first()
            self.resume()
            while True:
                self.lease.check()
                while self.rounds.have_room and self.may_begin():
                    self.ask(self.rounds.take())
                self.step()
                while groups := self.next_shard():
                    self.look()
                    self.append(groups, self.score(groups))

    def resume(self) -> None:
        """Go on after what is stored. In step with the trainer a shard is a round and has its number."""
        self.seq = self.log.next_seq(self.index)
        if self.lag is not None:
            self.rounds = Rounds(self.stream, self.config, first=self.seq)
        else:
            self.rounds = Rounds(self.stream, self.config, stored=self._asked_before())

    def _asked_before(self) -> Sequence[Asked]:
        """What the newest shards answer, or where none of them can be read those before."""
        end, each = self.seq, SHARDS_PER_ROUND * self.config.open_rounds
        while end > 0:
            if found := self.log.asked(self.index, range(max(0, end - each), end)):
                return found
            end -= each
        return ()

    def may_begin(self) -> bool:
        """Whether the next round may begin, once the version that it is to be by has been taken."""
        if self.lag is not None:
            self.adopt_exactly(max(self.first_version, self.rounds.next - self.lag))
            return True
        self.take_found()
        if self.in_flight and (self.fetched or self.is_spent):
            return False
        if self.is_spent:
            self.await_newer()
        return not (self.in_flight and self.fetched)

    @property
    def is_spent(self) -> bool:
        """Whether all rounds that may be by this version have begun."""
        return self.begun >= (self.config.rounds_per_version or self.begun + 1)

    def await_newer(self) -> None:
        with timed(self.seconds, "wait"):
            before = self.version
            for waited in looks(self.deadline):
                self.lease.check()
                self.adopt_newest()
                if self.version != before:
                    return
                self.lease.tell(f"waiting {waited:.0f} s for a version after {before}", **self.progress())
            raise DeadlinePassed(
                f"no version after {before} for {self.deadline:g} s (limits.data_deadline){self.what_is_damaged}"
            )

    def adopt_first(self, poll: float = 1.0) -> None:
        """Where the newest version is gone or damaged the trainer, as it goes on, publishes another."""
        began = time.monotonic()
        while True:
            self.lease.check()
            self.adopt_newest()
            if self.version:
                return
            waited = time.monotonic() - began
            why = self.what_is_damaged
            if waited > self.deadline:
                raise DeadlinePassed(f"no version could be adopted for {waited:.0f} s (limits.data_deadline){why}")
            self.lease.tell(f"waiting {waited:.0f} s for a version to adopt{why}", seconds_wait=waited)
            time.sleep(poll)

    def adopt_exactly(self, number: int) -> None:
        """Take the version of that number, of the newest attempt that has one, once it is there. A trainer that has
        published anything meanwhile is at work, and waited for anew."""
        with timed(self.seconds, "wait"):
            newest: Version | None = None
            while not self._has_adopted(number):
                for waited in looks(self.deadline):
                    self.lease.check()
                    complete = self.versions.complete()
                    if complete and complete[-1] != newest:
                        newest = complete[-1]
                        break
                    self.lease.tell(f"waiting {waited:.0f} s for version {number}", **self.progress())
                else:
                    raise DeadlinePassed(
                        f"no version {number} could be adopted for {self.deadline:g} s (limits.data_deadline)"
                        f"{self.what_is_damaged}"
                    )

    def _has_adopted(self, number: int) -> bool:
        found = [version for version in self.versions.complete() if version.number == number]
        if found:
            self.adopt(max(found, key=lambda version: version.order))
        return self.version is not None and self.version.number == number

    def adopt(self, version: Version) -> None:
        """Fetch and take a version, unless it is in use."""
        if version not in (self.version, self.refused):
            with self._reporting(version):
                self.take(version, self.versions.load(version))

    def adopt_newest(self) -> None:
        """Take the newest version if it is newer, for which there is nothing to do meanwhile."""
        self.look()
        self.take_found(wait=True)

    def look(self) -> None:
        """Have the newest version looked for and fetched, beside everything else."""
        if self.lag is None:
            with timed(self.seconds, "adopt"):
                self.lookout.look(after=self.fetched[0] if self.fetched else self.version, refused=self.refused)
            self.looked = time.monotonic()

    def take_found(self, *, wait: bool = False) -> None:
        """Take what the last look has found, at once or as soon as what is in flight has ended."""
        with timed(self.seconds, "adopt"):
            if found := self.lookout.take(wait=wait):
                with self._reporting(found.version):
                    if isinstance(found.folder, Exception):
                        raise found.folder
                    self.fetched = found.version, found.folder
            if self.fetched and (not self.in_flight or (found and self.updates_in_flight)):
                self.take(*self.fetched)

    def take(self, version: Version, folder: Path) -> None:
        """One that cannot be taken before what is in flight has ended is kept until then."""
        with self._reporting(version), suppress(Busy):
            self.generator.adopt(folder, version)
            self.version, self.begun, self.fetched = version, 0, None
            self.events.write("version-adopted", f"searcher {self.index} adopts {version}", version=str(version))

    @contextmanager
    def _reporting(self, version: Version) -> Iterator[None]:
        """One that cannot be loaded is reported, once, and passed over."""
        try:
            yield
            return
        except FileNotFoundError as error:  # pruned while it was being read: a newer one is there
            self.events.write("version-passed-over", str(error), severity="warning", version=str(version))
        except Damaged as error:
            self.refused = version
            self.events.write("version-refused", str(error), severity="error", version=str(version))
        if self.fetched and self.fetched[0] == version:
            self.fetched = None

    @property
    def what_is_damaged(self) -> str:
        return f"; {self.refused} is damaged" if self.refused else ""

    def ask(self, groups: Sequence[Group]) -> None:
        """Of one round."""
        temperature, top_p = self.sampling_of(groups[0].round)
        asked = {
            Request(
                prompt=group.prompt,
                seed=request_seed(self.seed, self.index, group.round, slot),
                limit=self.config.max_response_tokens,
                temperature=temperature,
                top_p=top_p,
            ): (group, slot)
            for group in groups
            for slot in group.slots
        }
        self.answers.submit(list(asked))
        self.in_flight |= asked
        self.begun += 1

    def step(self) -> None:
        """Generate for a moment, and take a newer version meanwhile if that is wanted."""
        with timed(self.seconds, "generate"):
            for request, response in self.answers.step():
                group, slot = self.in_flight.pop(request)
                group.ended[slot] = response
                if group.is_whole:
                    self.ended.append(group)
        if self.in_flight and self.lag is None:
            if time.monotonic() - self.looked >= LOOK_EVERY:
                self.look()
            self.take_found()

    def next_shard(self) -> list[Group]:
        """The groups that ended first, as many as a round has; fewer where nothing is in flight any more."""
        size = self.config.prompts_per_round
        if self.in_flight and len(self.ended) < size:
            return []
        groups, self.ended = self.ended[:size], self.ended[size:]
        return sorted(groups, key=lambda group: (group.round, group.number))

    def sampling_of(self, round: int) -> tuple[float, float]:
        """Temperature and `top_p` of a round, which follow from its number: now and then others, as in the paper."""
        chance = Random(request_seed(self.seed, self.index, round, -1))
        warmer, narrower, how_warm, how_narrow = (chance.random() for _ in range(4))
        config = self.config
        low, high = config.explored_temperatures
        return (
            low + (high - low) * how_warm if warmer < config.explore_share else config.temperature,
            1 - (1 - config.explore_top_p) * how_narrow if narrower < config.explore_share else config.top_p,
        )

    def score(self, groups: Sequence[Group]) -> list[Trajectory]:
        """Rewards and reference log-probabilities of what was generated, and the values of its steps."""
        prompts, responses = [group.prompt for group in groups], [group.responses for group in groups]
        with timed(self.seconds, "score"):
            ref_logps = self.scorer.token_logps(prompts, responses, temperature=self.config.temperature)
            scored = self.scoring.rewards(prompts, responses)
        steps = self.value(prompts, responses, scored)
        now = datetime.now(UTC)
        return [
            self._trajectory(group, slot, of_row, reward, divided, now)
            for group, of_group, rewards, of_steps in zip(groups, ref_logps, scored, steps, strict=True)
            for slot, of_row, reward, divided in zip(group.slots, of_group, rewards, of_steps, strict=True)
        ]

    def value(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[Sequence[Response]],
        rewards: Sequence[Sequence[Reward]],
    ) -> Sequence[Sequence[Steps | None]]:
        """The steps of each response and their values, where they are asked for."""
        if not self.config.value_samples:
            return [[None] * len(group) for group in responses]
        with timed(self.seconds, "value"):
            return values.estimate(
                self.scoring, self.generator, self.config, prompts, responses, rewards, tell=self.tell_of_values
            )

    def tell_of_values(self, done: int, total: int) -> None:
        self.lease.check()
        self.lease.tell(f"values of {done} of {total} states", **self.progress())

    def append(self, groups: Sequence[Group], trajectories: Sequence[Trajectory]) -> None:
        with timed(self.seconds, "append"):
            self.log.append(self.index, self.seq, trajectories)
        self.rounds.store(groups)
        self.seq += 1
        self.trajectories += len(trajectories)
        self.tokens += sum(t.length for t in trajectories)
        self.round = max(self.round, *(group.round for group in groups))
        self.lease.tell(f"round {self.round} with version {self.version}", **self.progress())

    def progress(self) -> dict[str, float]:
        return {
            "round": self.round,
            "shards": self.seq,
            "trajectories": self.trajectories,
            "tokens": self.tokens,
            **({"version": self.version.number} if self.version else {}),
            **{f"seconds_{part}": seconds for part, seconds in self.seconds.items()},
        }

    def _trajectory(
        self,
        group: Group,
        slot: int,
        ref_logps: tuple[float, ...],
        reward: Reward,
        steps: Steps | None,
        now: datetime,
    ) -> Trajectory:
        prompt, response = group.prompt, group.ended[slot]
        return Trajectory(
            searcher=self.index,
            round=group.round,
            slot=slot,
            version_start=response.version_start,
            version_end=response.version_end,
            prompt_id=prompt.prompt_id,
            group_id=f"{self.index}/{group.round}/{prompt.prompt_id}",
            prompt=prompt.text,
            response=response.text,
            prompt_tokens=prompt.tokens,
            response_tokens=response.tokens,
            behaviour_logps=response.logps,
            ref_logps=turns.own(ref_logps, response.loss_mask),
            loss_mask=response.loss_mask,
            step_ends=steps.ends if steps else None,
            step_values=steps.values if steps else None,
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
