"""A searcher finds: it adopts the newest version, takes prompts, generates, scores and appends, round after round."""

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import count
from random import Random

from tba import turns, values
from tba.config import SearchConfig
from tba.errors import Damaged, DeadlinePassed
from tba.interfaces import EventLog, Generator, Lease, ReferenceScorer, Task, TrajectoryLog, VersionStore
from tba.prompts import PromptStream, request_seed
from tba.scoring import Scoring
from tba.timing import looks, timed
from tba.types import Prompt, Response, Reward, Trajectory, Version
from tba.values import Steps

LOOK_EVERY = 1.0  # seconds between looks for a version to adopt while responses are in flight
WARMEST = 1.1 / 0.7
"""Times the temperature of search: the greatest of rounds that explore, unless the settings give another."""


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
        deadline: float,
        lag: int | None = None,
        first_version: int = 0,
        updates_in_flight: bool = False,
    ):
        values.check_can_value(task, config)
        self.index, self.seed, self.config, self.stream = index, seed, config, stream
        self.scoring = Scoring(task, remember=config.remembered_rewards)
        self.generator, self.scorer = generator, scorer
        self.log, self.versions, self.lease, self.events = log, versions, lease, events
        self.deadline = deadline  # for the first version, and for each that a round has to be by
        self.lag = lag  # in syncs, where it goes in step with the trainer
        self.first_version = first_version  # that rounds can be by: where a fork begins
        self.updates_in_flight = updates_in_flight  # adopts while it generates
        self.looked = 0.0  # for a version, while it generated
        self.version: Version | None = None
        self.refused: Version | None = None  # the newest one found damaged: it is not fetched again
        self.seconds: dict[str, float] = {}
        self.round = 0
        self.trajectories = 0
        self.tokens = 0

    def run(self) -> None:
        """Consumes versions; produces one shard a round. Waits for a first version that can be loaded, and never again
        unless it goes in step with the trainer: prompts do not run out. Ends when the lease says so."""
        if self.lag is None:
            self.adopt_first()
        for round in count(self.log.next_round(self.index)):
            self.lease.check()
            if self.lag is None:
                self.adopt_newest()
            else:
                self.adopt_exactly(max(self.first_version, round - self.lag))
            prompts = self.stream.take(round, self.config.prompts_per_round)
            responses = self.generate(round, prompts)
            trajectories = self.score(round, prompts, responses)
            self.append(round, trajectories)

    def adopt_first(self, poll: float = 1.0) -> None:
        """Where the newest version is gone or damaged the trainer, as it goes on, publishes another."""
        began = time.monotonic()
        while True:
            self.lease.check()
            self.adopt_newest()
            if self.version:
                return
            waited = time.monotonic() - began
            why = f"; {self.refused} is damaged" if self.refused else ""
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
                    refused = f"; {self.refused} is damaged" if self.refused else ""
                    raise DeadlinePassed(
                        f"no version {number} could be adopted for {self.deadline:g} s (limits.data_deadline){refused}"
                    )

    def _has_adopted(self, number: int) -> bool:
        found = [version for version in self.versions.complete() if version.number == number]
        if found:
            self.adopt(max(found, key=lambda version: version.order))
        return self.version is not None and self.version.number == number

    def adopt_newest(self) -> None:
        """Take the newest version if it is newer: a listing that is behind may not show the one in use."""
        with timed(self.seconds, "adopt"):
            newest = self.versions.newest()
            if newest and not (self.version and newest.order <= self.version.order):
                self.adopt(newest)

    def adopt(self, version: Version) -> None:
        """Take a version, unless it is in use. One that cannot be loaded is reported, once, and passed over."""
        if version in (self.version, self.refused):
            return
        try:
            self.generator.adopt(self.versions.load(version), version)
        except FileNotFoundError as error:  # pruned while it was being read: a newer one is there
            self.events.write("version-passed-over", str(error), severity="warning", version=str(version))
            return
        except Damaged as error:
            self.refused = version
            self.events.write("version-refused", str(error), severity="error", version=str(version))
            return
        self.version = version
        self.events.write("version-adopted", f"searcher {self.index} adopts {version}", version=str(version))

    def generate(self, round: int, prompts: Sequence[Prompt]) -> list[list[Response]]:
        each = self.config.responses_per_prompt
        seeds = [
            [request_seed(self.seed, self.index, round, i * each + j) for j in range(each)] for i in range(len(prompts))
        ]
        temperature, top_p = self.sampling_of(round)
        with timed(self.seconds, "generate"):
            return turns.generate(
                self.scoring.task,
                self.generator,
                prompts,
                seeds,
                max_tokens=self.config.max_response_tokens,
                temperature=temperature,
                top_p=top_p,
                between=self.update_in_flight,
            )

    def update_in_flight(self) -> None:
        """Take a newer version while responses are in the making, if that is wanted; looks at most once a second."""
        if self.updates_in_flight and time.monotonic() - self.looked >= LOOK_EVERY:
            self.adopt_newest()
            self.looked = time.monotonic()

    def sampling_of(self, round: int) -> tuple[float, float]:
        """Temperature and `top_p` of a round, which follow from its number: now and then others, as in the paper."""
        chance = Random(request_seed(self.seed, self.index, round, -1))
        warmer, narrower, how_warm, how_narrow = (chance.random() for _ in range(4))
        config = self.config
        low, high = config.explore_temperature or (config.temperature, config.temperature * WARMEST)
        return (
            low + (high - low) * how_warm if warmer < config.explore_share else config.temperature,
            1 - (1 - config.explore_top_p) * how_narrow if narrower < config.explore_share else config.top_p,
        )

    def score(self, round: int, prompts: Sequence[Prompt], responses: Sequence[Sequence[Response]]) -> list[Trajectory]:
        """Rewards and reference log-probabilities of a round's responses, and the values of their steps."""
        with timed(self.seconds, "score"):
            ref_logps = self.scorer.token_logps(prompts, responses, temperature=self.config.temperature)
            scored = self.scoring.rewards(prompts, responses)
        steps = self.value(prompts, responses, scored)
        now = datetime.now(UTC)
        each = self.config.responses_per_prompt
        return [
            self._trajectory(round, i * each + j, prompt, response, ref_logps[i][j], scored[i][j], steps[i][j], now)
            for i, prompt in enumerate(prompts)
            for j, response in enumerate(responses[i])
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

    def append(self, round: int, trajectories: Sequence[Trajectory]) -> None:
        with timed(self.seconds, "append"):
            self.log.append(self.index, round, trajectories)
        self.trajectories += len(trajectories)
        self.tokens += sum(t.length for t in trajectories)
        self.round = round
        self.lease.tell(f"round {round} with version {self.version}", **self.progress())

    def progress(self) -> dict[str, float]:
        return {
            "round": self.round,
            "trajectories": self.trajectories,
            "tokens": self.tokens,
            **{f"seconds_{part}": seconds for part, seconds in self.seconds.items()},
        }

    def _trajectory(
        self,
        round: int,
        slot: int,
        prompt: Prompt,
        response: Response,
        ref_logps: tuple[float, ...],
        reward: Reward,
        steps: Steps | None,
        now: datetime,
    ) -> Trajectory:
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
