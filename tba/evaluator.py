"""An evaluator scores chosen versions on held-out prompts, beside training and never in its way."""

import time
from collections.abc import Sequence

from tba.config import Config
from tba.interfaces import EvaluationLog, Generator, Lease, Task, VersionStore
from tba.searcher import request_seed
from tba.types import Prompt, Score, Version


class Evaluator:
    def __init__(
        self,
        config: Config,
        *,
        prompts: Sequence[Prompt],
        task: Task,
        generator: Generator,
        versions: VersionStore,
        evaluations: EvaluationLog,
        lease: Lease,
    ):
        self.config, self.task, self.prompts = config, task, prompts
        self.generator, self.versions, self.evaluations, self.lease = generator, versions, evaluations, lease

    def run(self, poll: float = 1.0) -> None:
        """Consumes versions; produces evaluations. Waits for the next version that is due; ends with the last."""
        while True:
            self.lease.check()
            done = self.evaluations.done()
            if any(v.number == self.config.last_sync for v in done):
                return
            version = self.due(done)
            if version is None:
                self.lease.tell("waiting for a version to score")
                time.sleep(poll)
                continue
            try:
                self.generator.adopt(self.versions.load(version), version)
            except FileNotFoundError:  # pruned before its turn came
                continue
            self.evaluations.write(self.scores(version))

    def due(self, done: set[Version]) -> Version | None:
        """The start first, the last version always, in between the newest one once `every` syncs have passed."""
        reference, newest = self.versions.reference(), self.versions.newest()
        if reference is not None and not any(v.number == 0 for v in done):
            return reference
        if newest is None or newest in done:
            return None
        last_scored = max((v.number for v in done), default=0)
        if newest.number == self.config.last_sync or newest.number - last_scored >= self.config.evaluation.every:
            return newest
        return None

    def scores(self, version: Version) -> list[Score]:
        search, samples = self.config.search, self.config.evaluation.samples
        greedy = self._score(version, "greedy", [[0]] * len(self.prompts), temperature=0.0)
        if not samples:
            return [greedy]
        seeds = [
            [request_seed(self.config.seed, -1, 0, i * samples + j) for j in range(samples)]
            for i in range(len(self.prompts))
        ]
        return [greedy, self._score(version, "sampled", seeds, temperature=search.temperature)]

    def _score(self, version: Version, metric: str, seeds: list[list[int]], *, temperature: float) -> Score:
        """Mean reward over all responses; generated in pieces so that a long evaluation hears a request to stop."""
        began = time.monotonic()
        rewards: list[float] = []
        piece = max(1, self.config.search.batch_responses // len(seeds[0]))
        for first in range(0, len(self.prompts), piece):
            self.lease.check()
            self.lease.tell(f"{metric} of version {version}: {first} of {len(self.prompts)} prompts")
            prompts = self.prompts[first : first + piece]
            responses = self.generator.generate(
                prompts, seeds[first : first + piece], temperature=temperature, top_p=self.config.search.top_p
            )
            rewards += [self.task.reward(p, r).value for p, rs in zip(prompts, responses, strict=True) for r in rs]
        return Score(
            version=version,
            step=self.versions.step(version),
            metric=metric,
            value=sum(rewards) / len(rewards),
            n=len(rewards),
            seconds=time.monotonic() - began,
        )
