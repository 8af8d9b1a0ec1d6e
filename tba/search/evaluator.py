"""The evaluator: it scores chosen versions on held-out prompts while training goes on. Training does not wait for the
evaluator, except for a GPU that both use in shifts."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tba.alarms import Alarm, Alarms
from tba.config import Config
from tba.errors import Damaged
from tba.generation.requests import generate
from tba.interfaces import (
    EvaluationLog,
    EventLog,
    Generator,
    Lease,
    Measures,
    ReferenceScorer,
    Task,
    VersionStore,
)
from tba.runtime.shifts import NO_SHIFTS, Shift
from tba.search import turns
from tba.search.examples import example
from tba.search.scoring import Scoring
from tba.seeds import request_seed
from tba.tasks.guard import asking
from tba.types import Example, Prompt, Response, Reward, Score, Version


class Evaluator:
    """On a GPU that is shared in shifts, a shift is the scoring of one version."""

    def __init__(
        self,
        config: Config,
        *,
        prompts: Sequence[Prompt],
        task: Task,
        generator: Generator,
        reference: ReferenceScorer | None = None,
        trainers_scorer: Callable[[Path, Version], ReferenceScorer] | None = None,
        versions: VersionStore,
        evaluations: EvaluationLog,
        lease: Lease,
        events: EventLog,
        shift: Shift = NO_SHIFTS,
    ):
        self.shift = shift
        self.config, self.scoring, self.prompts = config, Scoring(task), prompts
        self.generator, self.versions, self.evaluations = generator, versions, evaluations
        self.reference = reference  # set if the measures of the task need it
        self.trainers_scorer = trainers_scorer  # set if the generator is not the trainer's implementation
        self.scorer: ReferenceScorer | None = None  # the trainer's implementation of the version in use
        self.lease, self.events = lease, events
        self.alarms = Alarms(events.write)
        self.passed_over: set[Version] = set()  # versions not to try again: scored, removed or damaged
        self.scored = 0

    def run(self, poll: float = 1.0) -> None:
        """Consume versions and produce evaluations: wait for each version that is due, and score it. Return once the
        last version of the run is scored."""
        while True:
            self.lease.check()
            self.shift.end()
            done = self.evaluations.done()
            self.scored = len(done)
            if any(v.number == self.config.last_sync for v in done):
                return
            version = self.due(done)
            step = self.adopt(version) if version else None
            if version and step is not None:
                scores, examples = self.evaluate(version, step)
                self.scorer = None
                self.evaluations.write(scores, examples)
                self.alarms.update(self.mismatched(scores))
                # Score it only once, even if `done` does not list it because a fork inherited the name of its scores.
                self.passed_over.add(version)
                continue
            self.lease.tell("waiting for a version to score", scored=self.scored)
            time.sleep(poll)

    def due(self, done: set[Version]) -> Version | None:
        """Return the version to score next, or None. Version 0 comes first; once the last version of the run is
        published, it comes next. Otherwise only versions newer than the last scored one count: the newest whose number
        is a multiple of `evaluation.every`, or else the newest of all if `evaluation.every` syncs have passed since the
        last scored version. Versions that the evaluator was too slow for are never scored."""
        every, known = self.config.evaluation.every, done | self.passed_over
        reference, newest = self.versions.reference(), self.versions.newest()
        if reference and reference not in self.passed_over and not any(v.number == 0 for v in done):
            return reference
        if newest is None or newest in known:
            return None
        if newest.number == self.config.last_sync:
            return newest
        last_scored = max((v.number for v in done), default=0)
        later = [v for v in self.versions.complete() if v.number > last_scored and v not in known]
        regular = [v for v in later if v.number % every == 0]
        if regular:
            return max(regular, key=lambda version: version.order)
        return newest if newest.number - last_scored >= every else None

    def adopt(self, version: Version) -> int | None:
        """Load a version and return the gradient step that it follows. The step is read first, because the version may
        be pruned while it is scored. If the version cannot be loaded, report this in an event, never try this version
        again, and return None. If the damaged version is the last of the run, raise Damaged."""
        try:
            step = self.versions.step(version)
            folder = self.versions.load(version)
            self.shift.begin()
            self.generator.adopt(folder, version)
            self.scorer = self.trainers_scorer(folder, version) if self.trainers_scorer else None
        except FileNotFoundError as error:  # the version was pruned before its turn
            self.events.write("version-passed-over", str(error), severity="warning", version=str(version))
        except Damaged as error:
            self.events.write("version-refused", str(error), severity="error", version=str(version))
            if version.number == self.config.last_sync:  # no later version will come
                raise
        else:
            return step
        self.passed_over.add(version)
        return None

    def mismatched(self, scores: Sequence[Score]) -> list[Alarm]:
        most = self.config.alarms.mismatch
        return [
            Alarm(
                "mismatch-large",
                f"{score.metric} of version {score.version} is {score.value:.3g} nats, more than {most:g} "
                "(alarms.mismatch): the engine's log-probabilities are far from the trainer's",
            )
            for score in scores
            if most and score.metric == "greedy_mismatch_response" and score.value > most
        ]

    def evaluate(self, version: Version, step: int) -> "Evaluation":
        """Return the scores of one greedy response to each prompt, followed by the scores of `evaluation.samples`
        sampled responses to each prompt. The examples are the first `evaluation.examples` greedy responses."""
        config, samples, ks = self.config, self.config.evaluation.samples, self.config.evaluation.pass_at
        seeds = [[0]] * len(self.prompts)
        greedy, answered = self._scores(version, step, "greedy", seeds, temperature=0.0, top_p=1.0)
        firsts = list(zip(answered.asked, answered.rewards, strict=True))[: config.evaluation.examples]
        examples = [example(version, step, prompt, response, reward) for (prompt, response), reward in firsts]
        if not samples:
            return Evaluation(greedy, examples)
        seeds = [
            [request_seed(config.seed, -1, 0, i * samples + j) for j in range(samples)]
            for i in range(len(self.prompts))
        ]
        temperature, top_p = config.evaluation_temperature, config.evaluation_top_p
        sampled, _ = self._scores(version, step, "sampled", seeds, temperature=temperature, top_p=top_p, ks=ks)
        return Evaluation(greedy + sampled, examples)

    def _scores(
        self,
        version: Version,
        step: int,
        metric: str,
        seeds: list[list[int]],
        *,
        temperature: float,
        top_p: float,
        ks: Sequence[int] = (),
    ) -> tuple[list[Score], "_Answered"]:
        """Generate responses, and return their scores and the responses. The scores are the mean reward, pass@k for
        each k, the measures of the task, and the difference between the generator's and the trainer's
        log-probabilities."""
        began = time.monotonic()
        answered = self._answered(version, metric, seeds, temperature=temperature, top_p=top_p)
        measured = self._measured(version, metric, answered)
        seconds = time.monotonic() - began
        values, each = [reward.value for reward in answered.rewards], len(seeds[0])
        score = partial(Score, version=version, step=step, temperature=temperature, top_p=top_p)
        scores = [score(metric=metric, value=sum(values) / len(values), n=len(values), seconds=seconds)]
        solved = [reward >= self.config.evaluation.solved_at for reward in values]
        right = [sum(solved[first : first + each]) for first in range(0, len(solved), each)]
        for k in ks:
            chances = [pass_at(k, n=each, right=c) for c in right]
            scores.append(score(metric=f"pass@{k}", value=sum(chances) / len(chances), n=len(chances), seconds=0.0))
        for name, value in {**measured, **mismatch(answered)}.items():
            scores.append(score(metric=f"{metric}_{name}", value=value, n=len(values), seconds=0.0))
        return scores, answered

    def _answered(
        self, version: Version, metric: str, seeds: list[list[int]], *, temperature: float, top_p: float
    ) -> "_Answered":
        """Generate and score the responses to all prompts. Work on a batch of prompts at a time, so that a request to
        stop is heard during a long evaluation."""
        answered = _Answered([], [], [], [])
        piece = max(1, self.config.search.batch_responses // len(seeds[0]))
        for first in range(0, len(self.prompts), piece):
            self.lease.check()
            status = f"{metric} of version {version}: {first} of {len(self.prompts)} prompts"
            self.lease.tell(status, scored=self.scored)
            prompts = self.prompts[first : first + piece]
            responses = generate(
                turns.whole(self.scoring.task, self.generator),
                prompts,
                seeds[first : first + piece],
                temperature=temperature,
                top_p=top_p,
            )
            answered.asked.extend((p, r) for p, group in zip(prompts, responses, strict=True) for r in group)
            answered.rewards.extend(r for group in self.scoring.rewards(prompts, responses) for r in group)
            if self.scorer and metric == "greedy":  # any engine returns exact `logps` for greedy responses
                scored = self.scorer.token_logps(prompts, responses, temperature=1.0)
                answered.trainers_logps.extend(_own(scored, responses))
            if self.reference:  # at the temperature of the responses' `logps`, which is 1 for greedy ones
                scored = self.reference.token_logps(prompts, responses, temperature=temperature or 1.0)
                answered.ref_logps.extend(_own(scored, responses))
        return answered

    def _measured(self, version: Version, metric: str, answered: "_Answered") -> Mapping[str, float]:
        task, ref_logps = self.scoring.task, answered.ref_logps if self.reference else None
        if not isinstance(task, Measures):
            return {}
        with ThreadPoolExecutor(1, "measures") as pool:  # measures may take longer than a role may be silent
            measures, began = pool.submit(task.measures, answered.asked, answered.rewards, ref_logps), time.monotonic()
            while not wait([measures], 1.0).done:
                self.lease.check()
                spent = time.monotonic() - began
                self.lease.tell(f"measuring {metric} of version {version} for {spent:.0f} s", scored=self.scored)
            with asking(task, "measures"):
                return measures.result()


class Evaluation(NamedTuple):
    """The scores of one version, and examples of its responses."""

    scores: list[Score]
    examples: list[Example]


class _Answered(NamedTuple):
    """Every response of an evaluation, prompt after prompt."""

    asked: list[tuple[Prompt, Response]]
    rewards: list[Reward]
    ref_logps: list[tuple[float, ...]]  # under the reference; empty unless the task's measures need it
    trainers_logps: list[tuple[float, ...]]  # by the trainer's implementation; empty if the generator uses the same


def _own(
    scored: Sequence[Sequence[tuple[float, ...]]], responses: Sequence[Sequence[Response]]
) -> Iterator[tuple[float, ...]]:
    """Yield the log-probabilities of each response. As in the `logps` of a response, tokens that the policy did not
    write get 0."""
    for row, group in zip(scored, responses, strict=True):
        for logps, response in zip(row, group, strict=True):
            yield turns.own(logps, response.loss_mask)


def mismatch(answered: _Answered) -> Mapping[str, float]:
    """Compare the generator's log-probabilities with the trainer's, and return three numbers by name. `mismatch` and
    `mismatch_max` are the mean and the maximum of the absolute difference, over the tokens that the policy wrote. The
    differences of each response are also summed; `mismatch_response` is the mean of the absolute sums. Return an empty
    dict if the trainer's log-probabilities were not computed."""
    if not answered.trainers_logps:
        return {}
    responses = [response for _, response in answered.asked]
    away = [
        [own - trainers for own, trainers in zip(response.logps, logps, strict=True)]  # 0 for an environment's tokens
        for response, logps in zip(responses, answered.trainers_logps, strict=True)
    ]
    of_tokens = [abs(difference) for row in away for difference in row]
    written = sum(sum(response.loss_mask or [True] * len(response.tokens)) for response in responses)
    return {
        "mismatch": sum(of_tokens) / written,
        "mismatch_max": max(of_tokens),
        "mismatch_response": sum(abs(sum(row)) for row in away) / len(away),
    }


def pass_at(k: int, *, n: int, right: int) -> float:
    """Return an unbiased estimate of the chance that at least one of k responses is right, from n responses of which
    `right` are right. The estimate is the share of all choices of k of the n responses that contain a right one, 1 - (n
    - right choose k) / (n choose k) (arXiv:2107.03374). Only the last division rounds."""
    ways = math.comb(n, k)
    return (ways - math.comb(n - right, k)) / ways
