"""Addition digit by digit: two three-digit numbers and their sum, all written units first, as one adds on paper.

"743+685=" asks for 347 + 586; the answer "339" is 933. Reward 1 if the whole answer is right. A tiny Llama learns to
add from demonstrations half of which carry a wrong digit, or two, and is then right about four times in ten; it
knows more than it says, and training for the reward brings that out within minutes.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from tba.config import TaskConfig
from tba.errors import ConfigError
from tba.tasks.fields import one_of
from tba.types import Prompt, Response, Reward

TRAIN_PROMPTS, TEST_PROMPTS = 4096, 1000
WRONG = 0.5  # share of demonstrations that carry a wrong digit, or two
_LEAST, _MOST = 100, 999


class Problem(NamedTuple):
    left: int
    right: int

    @property
    def prompt(self) -> str:
        return f"{_units_first(self.left)}+{_units_first(self.right)}="

    @property
    def answer(self) -> str:
        return _units_first(self.left + self.right)


def exact(response: str, answer: str) -> bool:
    """Nothing but the answer."""
    return response == answer


RULES: dict[str, Callable[[str, str], bool]] = {"exact": exact}


class Quickstart:
    name = "quickstart"
    rules = RULES

    def __init__(self, config: TaskConfig):
        for field in ("train", "test", "template"):
            if given := getattr(config, field):
                raise ConfigError(
                    f"task.{field}: quickstart makes its own prompts, so nothing can be chosen, got {given!r}"
                )
        if config.rule:
            one_of("rule", config.rule, RULES)

    def source(self, split: str) -> str:
        return ""

    def prompts(
        self, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int
    ) -> list[Prompt]:
        """The same problems in every run; those of `test` occur neither in `train` nor in demonstrations."""
        chosen = problems(split)
        tokens = tokenizer([problem.prompt for problem in chosen]).input_ids
        prompts = [
            Prompt(
                prompt_id=f"{split}-{i:05d}",
                text=problem.prompt,
                tokens=tuple(ids),
                answer=problem.answer,
                metadata={"problem": f"{problem.left} + {problem.right} = {problem.left + problem.right}"},
            )
            for i, (problem, ids) in enumerate(zip(chosen, tokens, strict=True))
        ]
        return [prompt for prompt in prompts if len(prompt.tokens) <= max_tokens]

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        return Reward(value=float(response.finished and exact(response.text, prompt.answer)))

    def step_ends(self, text: str) -> Sequence[int]:
        """Each digit is a step."""
        return range(1, len(text))

    def recipe(self) -> str:
        """All that the base policy is made from: this code, what it teaches with, and the libraries."""
        here = Path(__file__)
        sources = (here, here.with_name("quickstart_policy.py"), here.parents[1] / "models" / "supervised.py")
        digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
        return f"quickstart {digest} torch {version('torch')} transformers {version('transformers')}"

    def base_policy(self, folder: Path, *, seed: int, report: Callable[[str, float], None]) -> None:
        """Write a Hugging Face folder; half a minute on one core."""
        from tba.tasks.quickstart_policy import make_policy  # torch is needed for this alone

        make_policy(folder, seed=seed, report=report)


@cache
def problems(split: str) -> tuple[Problem, ...]:
    """The prompts of a split. One seeded sample without replacement, so that splits share none."""
    span = _MOST - _LEAST + 1
    drawn = random.Random("quickstart").sample(range(span * span), TEST_PROMPTS + TRAIN_PROMPTS)
    of_split = {"test": drawn[:TEST_PROMPTS], "train": drawn[TEST_PROMPTS:]}[split]
    return tuple(Problem(_LEAST + number // span, _LEAST + number % span) for number in of_split)


def demonstrations(seed: int) -> Iterator[tuple[str, str]]:
    """Endless prompts and responses; every other response, by chance, carries a wrong digit, or two."""
    rng = random.Random(f"quickstart:{seed}")
    held_out = frozenset(problems("test"))
    while True:
        problem = Problem(rng.randint(_LEAST, _MOST), rng.randint(_LEAST, _MOST))
        if problem not in held_out:
            yield problem.prompt, _with_wrong_digits(problem.answer, rng) if rng.random() < WRONG else problem.answer


def _with_wrong_digits(answer: str, rng: random.Random) -> str:
    digits = list(answer)
    for place in rng.sample(range(len(digits)), rng.choice([1, 2])):
        digits[place] = rng.choice([digit for digit in "0123456789" if digit != digits[place]])
    return "".join(digits)


def _units_first(number: int) -> str:
    return str(number)[::-1]
