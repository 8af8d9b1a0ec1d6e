"""Instructions: requests with constraints that a program can check, such as a number of words, words to use, or JSON.
Many different responses are right. The reward is 1 if all constraints hold, or the share of constraints that hold."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import Field

from tba.config import TaskConfig, parse_options, settings
from tba.errors import ConfigError
from tba.models import chat_template
from tba.settings import Positive
from tba.tasks.fields import one_of
from tba.tasks.instructions import checker_process, published_prompts
from tba.tasks.instructions.constraints import KINDS, MOST_TOGETHER, Constraint
from tba.tasks.instructions.own_prompts import Instruction, Mixture
from tba.tasks.laptop_packages import check_installed
from tba.types import Prompt, Response, Reward

PACKAGES = ("if_verifiable", "datasets", "emoji", "immutabledict", "langdetect", "nltk", "syllapy")
TEMPLATES = ("chat", "plain")


@settings
class Options:
    credit: Literal["all", "partial"] = "all"
    """Reward of a response. `all`: 1 if all constraints hold, else 0. `partial`: the share of constraints that
    hold."""
    unfinished: Literal["zero", "check"] = "zero"
    """Reward of a response that does not end within `search.max_response_tokens`. `zero`: 0, and none of its
    constraints counts as kept. `check`: its constraints are checked like those of other responses."""
    uncheckable: Literal["refuse", "leave-out"] = "refuse"
    """How to treat rows of `task.train` and `task.test` with a constraint that cannot be checked on this machine.
    `refuse`: the run is refused, and the error names the first such row. `leave-out`: such rows make no prompts."""
    seed: Annotated[int, Field(ge=0, le=2**63 - 1)] = 0
    """Seed of our own prompts."""
    train_prompts: Positive = 2048
    """Number of our own prompts for training."""
    test_prompts: Positive = 512
    """Number of our own prompts for evaluation."""
    constraints: Annotated[tuple[Annotated[int, Field(ge=1, le=MOST_TOGETHER)], ...], Field(min_length=1)] = (1, 2, 3)
    """Numbers of constraints that our own prompts have. Each is equally likely; a number that is repeated is more
    likely."""
    words: Annotated[int, Field(ge=20, le=10_000)] = 40
    """Largest number of words that a constraint of our own prompts asks for, or limits a response to. A word has about
    1.4 tokens, so `search.max_response_tokens` should be at least twice as large."""
    kinds: tuple[str, ...] = ()
    """Kinds of constraints of our own prompts. Empty takes all kinds."""
    held_out_kinds: tuple[str, ...] = ()
    """Kinds of constraints that our own training prompts never have. Each of our own evaluation prompts then has at
    least one of them."""


class Instructions:
    """Trains on our own prompts, and evaluates on our own or on published ones, such as IFEval and IFBench."""

    name = "instructions"
    fields = published_prompts.FIELDS
    needs_reference = False

    def __init__(self, config: TaskConfig):
        if config.rule:
            raise ConfigError(f"task.rule must be empty: instructions has only one rule, got {config.rule!r}")
        self.config, self.options = config, parse_options(Options, config)
        self.template = one_of("template", config.template or TEMPLATES[0], TEMPLATES)
        self.mixture = _mixture(self.options)
        check_installed("task.name", self.name, *PACKAGES)
        self.checkers = checker_process.shared()

    def source(self, split: str) -> str:
        return ""

    def prompts(
        self, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int
    ) -> list[Prompt]:
        """Make a prompt of each row, or our own prompts if the setting of the split, such as `task.test`, is empty."""
        is_published = bool(getattr(self.config, split))
        if is_published:
            leave_out = self.options.uncheckable == "leave-out"
            chosen = published_prompts.read(split, rows, leave_out=leave_out)
        else:
            count = self.options.test_prompts if split == "test" else self.options.train_prompts
            chosen = {i: self.mixture.draw(split, i) for i in range(count)}
        prompts = [
            Prompt(
                prompt_id=f"{split}-{i:05d}",
                text=text,
                tokens=tokens,
                metadata={
                    **({"key": rows[i].get("key")} if is_published else {}),
                    "instruction_id_list": [constraint.kind for constraint in instruction.constraints],
                    "kwargs": [dict(constraint.arguments) for constraint in instruction.constraints],
                },
            )
            for i, instruction in chosen.items()
            for text, tokens in [self._worded(instruction, tokenizer)]
        ]
        return [prompt for prompt in prompts if len(prompt.tokens) <= max_tokens]

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        """Return the reward. Its parts are the share of constraints that hold, whether all do, whether the check took
        too long, and each constraint. A response whose check takes too long keeps no constraint."""
        constraints = _constraints_of(prompt)
        held = self._check(constraints, response)
        held, unscored = (held, 0.0) if held is not None else ([False] * len(constraints), 1.0)
        share = sum(held) / len(held)
        parts = {"strict": float(share == 1), "held": share, "constraints": float(len(held)), "unscored": unscored}
        for constraint, kept in zip(constraints, held, strict=True):
            parts[constraint.kind] = min(parts.get(constraint.kind, 1.0), float(kept))
        return Reward(value=share if self.options.credit == "partial" else parts["strict"], parts=parts)

    def measures(
        self,
        asked: Sequence[tuple[Prompt, Response]],
        rewards: Sequence[Reward],
        ref_logps: Sequence[Sequence[float]] | None,
    ) -> dict[str, float]:
        """Return the share of responses whose constraints all hold, the same by the loose rule, the share of all
        constraints that hold, and the share of responses that are right and different from each other."""
        parts = [reward.parts for reward in rewards]
        constraints = [part["constraints"] for part in parts]
        kept = [part["held"] * part["constraints"] for part in parts]
        return {
            "strict_accuracy": fmean(part["strict"] for part in parts),
            "loose_accuracy": fmean(map(self._is_loosely_right, asked, rewards)),
            "instruction_accuracy": sum(kept) / sum(constraints),
            "distinct_right": fmean(_distinct_right(asked, rewards)),
        }

    def _is_loosely_right(self, asked: tuple[Prompt, Response], reward: Reward) -> bool:
        if reward.parts["unscored"]:
            return False  # the loose rule checks more texts, so it would take longer still
        prompt, response = asked
        return all(self._check(_constraints_of(prompt), response, loosely=True) or [False])

    def _check(
        self, constraints: Sequence[Constraint], response: Response, *, loosely: bool = False
    ) -> list[bool] | None:
        """Return, for each constraint, whether a response keeps it; None if its check takes too long."""
        if not response.finished and self.options.unfinished == "zero":
            return [False] * len(constraints)
        return self.checkers.check(constraints, response.text, loosely=loosely)

    def _worded(self, instruction: Instruction, tokenizer: Any) -> tuple[str, tuple[int, ...]]:
        """Return the text and tokens of a prompt. `chat` uses the model's chat template, or the wording of `plain` if
        the model has none."""
        message = {"role": "user", "content": instruction.text}
        if self.template == "plain" or not chat_template.has_template(tokenizer):
            message = {"role": "text", "content": f"{instruction.text}\n\n"}
        text = chat_template.opening(tokenizer, [message])
        return text, tuple(chat_template.tokens(tokenizer, [message], text))


def _mixture(options: Options) -> Mixture:
    for field in ("kinds", "held_out_kinds"):
        for kind in getattr(options, field):
            if kind not in KINDS:
                raise ConfigError(f"task.options.{field}: unknown kind {kind!r}; known: {', '.join(KINDS)}")
    kinds = options.kinds or tuple(KINDS)
    for kind in options.held_out_kinds:
        if kind not in kinds:
            raise ConfigError(f"task.options.held_out_kinds: {kind!r} is not one of task.options.kinds")
    mixture = Mixture(options.seed, options.constraints, options.words, kinds, options.held_out_kinds)
    for count in options.constraints:
        for split in ("train", "test"):
            mixture.combinations(split, count)
    return mixture


def _constraints_of(prompt: Prompt) -> list[Constraint]:
    kinds, arguments = prompt.metadata["instruction_id_list"], prompt.metadata["kwargs"]
    return [Constraint(kind, given) for kind, given in zip(kinds, arguments, strict=True)]


def _distinct_right(asked: Sequence[tuple[Prompt, Response]], rewards: Sequence[Reward]) -> Iterator[float]:
    """Yield, for each prompt, the number of different right responses divided by the number of responses. Responses
    that differ only in case or white space count as the same."""
    answered, right = Counter[str](), defaultdict[str, set[str]](set)
    for (prompt, response), reward in zip(asked, rewards, strict=True):
        answered[prompt.prompt_id] += 1
        if reward.parts["strict"] == 1:
            right[prompt.prompt_id].add(" ".join(response.text.casefold().split()))
    for prompt_id, count in answered.items():
        yield len(right[prompt_id]) / count
