"""Make the rows of a shard: trajectories from groups whose responses have all finished."""

from collections.abc import Sequence
from datetime import UTC, datetime

from tba.config import SearchConfig
from tba.interfaces import Generator, ReferenceScorer, Task
from tba.search import turns, values
from tba.search.open_rounds import Group
from tba.search.progress import Progress
from tba.search.scoring import Scoring
from tba.search.values import Steps
from tba.types import Prompt, Response, Reward, Trajectory, Version


class ShardAssembly:
    """Adds rewards, reference log-probabilities and the values of reasoning steps to the responses of a searcher.
    Without a scorer there are no reference log-probabilities. `reference` is the version of the reference."""

    def __init__(
        self,
        searcher: int,
        config: SearchConfig,
        *,
        task: Task,
        generator: Generator,
        scorer: ReferenceScorer | None,
        reference: Version,
        progress: Progress,
    ):
        values.check_can_value(task, config)
        self.searcher, self.config = searcher, config
        self.scoring = Scoring(task, remember=config.remembered_rewards)
        self.generator, self.scorer, self.reference, self.progress = generator, scorer, reference, progress

    def trajectories(self, groups: Sequence[Group]) -> list[Trajectory]:
        """Return the trajectories of whole groups, group after group and slot after slot."""
        prompts, responses = [group.prompt for group in groups], [group.responses for group in groups]
        with self.progress.timed("score"):
            ref_logps = self._ref_logps(prompts, responses)
            scored = self.scoring.rewards(prompts, responses)
        steps = self._values(prompts, responses, scored)
        now = datetime.now(UTC)
        return [
            self._trajectory(group, slot, of_row, reward, divided, now)
            for group, of_group, rewards, of_steps in zip(groups, ref_logps, scored, steps, strict=True)
            for slot, of_row, reward, divided in zip(group.slots, of_group, rewards, of_steps, strict=True)
        ]

    def _ref_logps(
        self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Response]]
    ) -> Sequence[Sequence[tuple[float, ...] | None]]:
        """Return the reference log-probabilities of each response, or None for each response without a scorer."""
        if self.scorer is None:
            return [[None] * len(group) for group in responses]
        return self.scorer.token_logps(prompts, responses, temperature=self.config.temperature)

    def _values(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[Sequence[Response]],
        rewards: Sequence[Sequence[Reward]],
    ) -> Sequence[Sequence[Steps | None]]:
        """Return the reasoning steps of each response with their values, or None for each response if the settings ask
        for no values."""
        if not self.config.value_samples:
            return [[None] * len(group) for group in responses]
        with self.progress.timed("value"):
            return values.estimate(
                self.scoring, self.generator, self.config, prompts, responses, rewards, tell=self._tell_of_values
            )

    def _tell_of_values(self, done: int, total: int) -> None:
        self.progress.check()
        self.progress.tell(f"values of {done} of {total} states")

    def _trajectory(
        self,
        group: Group,
        slot: int,
        ref_logps: tuple[float, ...] | None,
        reward: Reward,
        steps: Steps | None,
        now: datetime,
    ) -> Trajectory:
        prompt, response = group.prompt, group.ended[slot]
        return Trajectory(
            searcher=self.searcher,
            round=group.round,
            slot=slot,
            version_start=response.version_start,
            version_end=response.version_end,
            prompt_id=prompt.prompt_id,
            group_id=f"{self.searcher}/{group.round}/{prompt.prompt_id}",
            prompt=prompt.text,
            response=response.text,
            prompt_tokens=prompt.tokens,
            response_tokens=response.tokens,
            behaviour_logps=response.logps,
            ref_logps=None if ref_logps is None else turns.own(ref_logps, response.loss_mask),
            loss_mask=response.loss_mask,
            step_ends=steps.ends if steps else None,
            step_values=steps.values if steps else None,
            reference_version=self.reference,
            reward=reward.value,
            reward_parts=reward.parts,
            finished=response.finished,
            temperature=response.temperature,
            top_p=response.top_p,
            seed=response.seed,
            created_at=now,
            generate_seconds=response.generate_seconds,
        )
