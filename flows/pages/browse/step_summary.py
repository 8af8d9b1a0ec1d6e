"""The summary of a step in words: its draws, what was unusual, and whether the step followed the rewards.

Sentences without links are written here, those with links in templates/browse/parts/step_summary.html."""

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

from flows.pages.browse.batch import Batch, Drawn, Slot, mean_reward
from flows.pages.values import written

_UNUSUAL = 2.0  # times the median of the steps before
_LEAST_STEPS = 5  # fewer steps give no useful median
_LEAST_PUSH = 1e-3  # a smaller advantage is a rounding error of 0


def learned_from(batch: Batch) -> str:
    if not batch.draws:
        return "The batch of this step is not stored."
    recent = sum(it.times for it in batch if it.row["branch"] == "recent") / batch.draws
    ages = [it.row["age"] for it in batch for _ in range(it.times)]
    responses, prompts = sum(1 for _ in batch), len({it.row["prompt_id"] for it in batch})
    return (
        f"The step learned from {_counted(batch.draws, 'draw')} of {_counted(responses, 'response')} to "
        f"{_counted(prompts, 'prompt')}. {recent:.0%} of the draws were recent: their responses had entered the replay "
        f"buffer at the newest sync. The mean age of the draws was {written(sum(ages) / batch.draws)} steps, the "
        f"largest {max(ages):,}."
    )


def outcome(step: dict[str, Any], before: Sequence[tuple[Any, ...]]) -> Iterator[str]:
    """Yield a sentence for each unusual thing about a step. `before` has the loss and the gradient norm of the steps
    before it."""
    if step.get("skipped"):
        yield "The loss or the gradient was not finite, so the step was skipped: no weight changed."
    if step.get("clipped"):
        yield f"The gradient had the norm {written(step['grad_norm'])} and was scaled down to training.clip_norm."
    for place, (title, name) in enumerate((("loss", "loss"), ("gradient norm", "grad_norm"))):
        own, known = step[name], [row[place] for row in before if row[place] is not None]
        usual = median(known) if len(known) >= _LEAST_STEPS else 0.0
        if own is not None and usual > 0 and not 1 / _UNUSUAL < own / usual < _UNUSUAL:
            yield (
                f"The {title} is unusual: it is {written(own)}, and the median of the {len(known)} steps before is "
                f"{written(usual)}."
            )


def extremes(batch: Batch, beta: float | None) -> list[dict[str, Any]]:
    """Return the response that was raised most and the one that was lowered most, each with the numbers that explain
    this."""
    chosen = [("raised", batch.most_raised(1)), ("lowered", batch.most_lowered(1))]
    slots = {slot[0].row["slot"]: slot for slot in batch.slots}
    return [_extreme(word, found, slots[found.row["slot"]], beta) for word, drawn in chosen for found in drawn]


def _extreme(word: str, drawn: Drawn, slot: Slot, beta: float | None) -> dict[str, Any]:
    row, log_ratio, target = drawn.row, drawn.log_ratio, drawn.target(beta)
    extreme = {"word": word, "row": row, "times": drawn.times, "log_ratio": log_ratio, "target": target}
    if log_ratio is not None and target is not None and beta:
        worth, distance = row["reward"] / beta, abs(log_ratio - target)
        return {**extreme, "mean": None, "worth": worth, "distance": distance, "is_above": log_ratio > target}
    return {**extreme, "target": None, "mean": mean_reward(slot) if len(slot) > 1 else None}


def agreement(slots: Sequence[Slot]) -> str:
    """Return sentences that say how many draws with a reward above the mean of their slot were made more likely, how
    many below it less likely, and in how many slots all rewards are equal."""
    balances = any(it.row["residual"] is not None for slot in slots for it in slot)
    return " ".join([*_followed(slots, balances), *_alike(slots, balances)])


def _followed(slots: Sequence[Slot], balances: bool) -> Iterator[str]:
    better = worse = better_up = worse_down = 0
    for slot in slots:
        mean = mean_reward(slot)
        for it in slot if _differ(slot) else []:
            if it.row["advantage"] is None or it.row["reward"] == mean:
                continue
            if it.row["reward"] > mean:
                better, better_up = better + it.times, better_up + it.times * (it.push > 0)
            else:
                worse, worse_down = worse + it.times, worse_down + it.times * (it.push < 0)
    if better or worse:
        yield (
            f"Of {_counted(better, 'draw')} with a reward above the mean of their slot, {better_up:,} were raised. Of "
            f"{_counted(worse, 'draw')} with a reward below the mean, {worse_down:,} were lowered."
        )
        if balances and (better_up < better or worse_down < worse):
            yield "The other responses are already more likely, or less likely, than their rewards ask for."


def _alike(slots: Sequence[Slot], balances: bool) -> Iterator[str]:
    alike = [slot for slot in slots if not _differ(slot)]
    if not alike:
        return
    where = "its slot" if len(slots) == 1 else f"{len(alike):,} of {len(slots):,} slots"
    # A baseline that is not the mean of the slot, such as a critic's, moves responses of equal rewards, too.
    moved = not balances and any(abs(it.push) > _LEAST_PUSH for slot in alike for it in slot)
    movers = "." if moved else ": only the reference or the sampling policy can move these responses."
    yield f"In {where} all rewards are equal{movers}"


def _differ(slot: Slot) -> bool:
    return len({it.row["reward"] for it in slot}) > 1


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
