"""A searcher finds: it adopts the newest version, takes prompts, generates, scores and appends, round after round."""

from collections.abc import Sequence
from contextlib import closing

from tba.config import Config
from tba.errors import DeadlinePassed
from tba.interfaces import EventLog, Generator, Lease, ReferenceScorer, Task, TrajectoryLog, VersionStore
from tba.runtime.waiting import looks
from tba.search import turns
from tba.search.groups_in_flight import GroupsInFlight
from tba.search.progress import Progress
from tba.search.prompt_stream import PromptStream
from tba.search.round_requests import make_requests
from tba.search.rounds import Group, Rounds, newest_asked
from tba.search.shard_assembly import ShardAssembly
from tba.search.version_adoption import VersionAdoption
from tba.types import Version


class Searcher:
    """Begins rounds with the newest version as long as there is room for another (`search.open_rounds`). If responses
    are finished by the version that began them, no round begins while a newer version waits for them.

    `lag` is the number of syncs between a round and the version that generates it, if the searcher goes in step with
    the trainer. `first_version` is the number of the first version, which is above 0 in a fork.
    """

    def __init__(
        self,
        index: int,
        config: Config,
        *,
        stream: PromptStream,
        task: Task,
        generator: Generator,
        scorer: ReferenceScorer,
        log: TrajectoryLog,
        versions: VersionStore,
        lease: Lease,
        events: EventLog,
    ):
        self.index, self.seed, self.config, self.stream, self.log = index, config.seed, config.search, stream, log
        self.lag, self.first_version = config.sync.lag, config.start.sync
        self.progress = Progress(lease)
        self.assembly = ShardAssembly(
            index, config.search, task=task, generator=generator, scorer=scorer, progress=self.progress
        )
        self.adoption = VersionAdoption(
            index,
            generator=generator,
            versions=versions,
            events=events,
            progress=self.progress,
            deadline=config.limits.data_deadline,
            updates_in_flight=config.engine.in_flight == "update",
        )
        self.rounds = Rounds(stream, config.search)
        self.in_flight = GroupsInFlight(turns.whole(task, generator), shard_size=config.search.prompts_per_round)

    def run(self) -> None:
        """Consume versions and produce shards until the lease says to end. The searcher waits for a first version that
        can be loaded. Later it waits only in step with the trainer, or if the rounds of a version are bounded: prompts
        do not run out."""
        with closing(self.adoption):
            if self.lag is None:
                self.adoption.await_first()
            self.resume()
            while True:
                self.progress.check()
                while self.rounds.have_room and self.may_begin():
                    self.ask(self.rounds.take())
                self.step()
                while groups := self.in_flight.next_shard():
                    if self.lag is None:
                        self.adoption.look()
                    self.append(groups)

    def resume(self) -> None:
        """Go on after the stored shards. In step with the trainer a shard is a round and has its number."""
        self.progress.shards = self.log.next_seq(self.index)
        if self.lag is not None:
            self.rounds = Rounds(self.stream, self.config, first=self.progress.shards)
        else:
            stored = newest_asked(self.log, self.index, self.progress.shards, open_rounds=self.config.open_rounds)
            self.rounds = Rounds(self.stream, self.config, stored=stored)

    def may_begin(self) -> bool:
        """Return whether the next round may begin, after taking the version that the round has to be by."""
        adoption = self.adoption
        if self.lag is not None:
            adoption.await_number(max(self.first_version, self.rounds.next - self.lag))
            return True
        adoption.take_found(in_flight=bool(self.in_flight))
        if self.in_flight and (adoption.fetched or self.is_spent):
            return False
        if self.is_spent:
            adoption.await_newer()
        return not (self.in_flight and adoption.fetched)

    @property
    def is_spent(self) -> bool:
        """Whether all rounds that may be by the version in use have begun (`search.rounds_per_version`)."""
        most = self.config.rounds_per_version
        return most is not None and self.adoption.rounds_begun >= most

    def ask(self, groups: Sequence[Group]) -> None:
        """Ask for all responses to the groups of one round."""
        self.in_flight.ask(make_requests(groups, self.config, seed=self.seed, searcher=self.index))
        self.adoption.rounds_begun += 1

    def step(self) -> None:
        """Generate for a moment, and meanwhile take a newer version if the settings allow that."""
        with self.progress.timed("generate"):
            self.in_flight.step()
        if self.in_flight and self.lag is None:
            self.adoption.look_in_flight()

    def append(self, groups: Sequence[Group]) -> None:
        """Score the groups and store them as the next shard."""
        trajectories = self.assembly.trajectories(groups)
        with self.progress.timed("append"):
            self.log.append(self.index, self.progress.shards, trajectories)
        self.rounds.store(groups)
        self.progress.add_shard(trajectories)


def await_reference(versions: VersionStore, lease: Lease, *, deadline: float, poll: float = 0.5) -> Version:
    """Wait for version 0, the policy before training, which the trainer publishes."""
    for waited in looks(deadline, every=poll):
        lease.check()
        if version := versions.reference():
            return version
        lease.tell(f"waiting {waited:.0f} s for version 0", seconds_wait=waited)
    raise DeadlinePassed(f"no version 0 after {deadline:.0f} s (limits.data_deadline): is the trainer alive?")
