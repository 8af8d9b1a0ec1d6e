"""Runs for tests of selection: many responses of all lengths, real draws, and the part of the ledger that views
read."""

import random
from collections.abc import Callable
from typing import Any

from storage.buffer.replay_buffer import DuckReplayBuffer
from storage.buffer.sampler import default_sampler
from storage.log.ledger import ParquetLedger
from storage.log.prompts import write_prompts
from storage.log.trajectories import Trajectories
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from tba.types import Copies, Draw, Evict, Outcome, StepRecord, Trajectory, Version
from tests.support.builders import make_prompt, make_trajectory
from tests.support.storage.indexes import Sections, make_buffer, make_eligibility

PROMPTS = [f"train/{n:03d}" for n in range(48)]
SYNCS, EVERY, SLOTS, RESPONSES = 12, 2, 8, 4
PROMPTS_A_ROUND, RESPONSES_A_PROMPT, LONGEST = 16, 8, 20

ONLY_SHORT = default_sampler().replace(
    "where branch = 'prioritised' or sync = $newest",
    f"where length <= {LONGEST // 2} and (branch = 'prioritised' or sync = $newest)",
)
"""A sampler that never draws a long response."""

Respond = Callable[[random.Random, int], tuple[list[int], float]]
"""A function that returns the tokens and the reward of the n-th response to a prompt."""


def any_length(chance: random.Random, n: int) -> tuple[list[int], float]:
    """Respond differently each time. Half of the responses to a prompt are short; rewards do not depend on length."""
    half = LONGEST // 2
    length = chance.randrange(3, half + 1) if n % 2 else chance.randrange(half + 1, LONGEST + 1)
    return [chance.randrange(1 << 30) for _ in range(length)], float(chance.random() < 0.5)


def few_contents(chance: random.Random, n: int) -> tuple[list[int], float]:
    """Respond with one of few contents, whose reward varies."""
    return [chance.randrange(9)], chance.randrange(4) / 4


def make_choosing_run(
    root: str,
    *,
    seed: int = 0,
    sampler_sql: str = "",
    capacity: int = 100,
    evict: Evict = "oldest",
    copies: Copies = "newest",
    max_age: int | None = None,
    mean_reward_between: tuple[float, float] | None = None,
    behind: int = 0,
    respond: Respond = any_length,
    after: Callable[[int, DuckReplayBuffer], None] = lambda sync, buffer: None,
) -> Run:
    """Make a run with all steps of syncs 0 … `SYNCS`. `after` is called after each sync. One of the two searchers is up
    to `behind` versions behind the other."""
    config = {"seed": seed, "sampling": {"capacity": capacity, "evict": evict, "copies": copies, "max_age": max_age}}
    run = Run.create(root, f"chosen-{seed}", config=config, sampler_sql="", code_version="")
    write_prompts(run, "train", [make_prompt(prompt_id) for prompt_id in PROMPTS])
    attempt = claim_attempt(run).number
    drawing = {
        "eligibility": make_eligibility(capacity, evict, copies, max_age),
        "mean_reward_between": mean_reward_between,
    }
    buffer, ledger = choosing_buffer(run, seed, sampler_sql, attempt, **drawing), ParquetLedger(run, attempt)
    chance = random.Random(seed)
    for sync in range(SYNCS + 1):
        _search(run, chance, sync, respond, behind)
        steps = range((sync - 1) * EVERY + 1, sync * EVERY + 1) if sync else ()
        records = [_step(step, sync, buffer.draw(step), attempt) for step in steps]
        buffer.sync(sync, step=sync * EVERY)
        after(sync, buffer)
        if records:
            ledger.write(sync, records, weights_sha256="")
    return run


def _search(run: Run, chance: random.Random, round: int, respond: Respond, behind: int) -> None:
    for searcher in range(2):
        asked = chance.sample(PROMPTS, PROMPTS_A_ROUND)
        trajectories: list[Trajectory] = []
        for prompt_id in asked:
            for n in range(RESPONSES_A_PROMPT):
                tokens, reward = respond(chance, n)
                place = {
                    "searcher": searcher,
                    "round": round,
                    "slot": len(trajectories),
                    "version": max(0, round - 1 - searcher * (round % (behind + 1))),
                }
                trajectories.append(make_trajectory(prompt_id, tokens=tokens, reward=reward, **place))
        Trajectories(run).append(searcher, round, trajectories)


def choosing_buffer(run: Run, seed: int, sampler_sql: str, attempt: int, **drawing: Any) -> DuckReplayBuffer:
    sections = Sections(prompts_per_step=SLOTS, responses_per_prompt=RESPONSES, seed=seed, **drawing)
    return make_buffer(run, sections, sampler_sql=sampler_sql, attempt=attempt)


def _step(step: int, sync: int, draws: list[Draw], attempt: int) -> StepRecord:
    zero = {"advantage": 0.0, "residual": 0.0, "log_z": 0.0, "logp": 0.0, "ref_logp": 0.0}
    outcomes = [Outcome(slot=draw.slot, position=draw.position, **zero) for draw in draws]
    return StepRecord(
        step=step, sync=sync, version=Version(sync - 1, attempt), draws=draws, outcomes=outcomes, metrics={}
    )
