"""Two numbers with a given sum: a task with hundreds of right answers to each problem.

"347=" asks for two numbers whose sum is 743. Like all numbers here, it is written with the units first. One of the 744
right answers is "001+346", which says that 100 + 643 is 743. The reward is 1 for each of them.

The base policy is a model like that of the quickstart. It has learned from demonstrations whose first number is any
that is possible, in two lessons (`LESSONS`). In the first, all demonstrations are right, and in most of them the first
number belongs to the prompt. Otherwise the digits of the first number, which nothing can predict, hide the few that can
be computed: from some random weights the policy then learns no more than the form of an answer. In the second lesson, a
quarter of the demonstrations have one or two wrong digits in the second number.
"""

import hashlib
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba.config import TaskConfig
from tba.errors import RunFailed
from tba.tasks import quickstart_problems
from tba.tasks.quickstart_problems import units_first, with_wrong_digits
from tba.types import Prompt, Response, Reward

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

LEAST, MOST, TEST_PROMPTS = 300, 999, 100
BATCH, WARMUP_STEPS = 128, 50
GIVEN = 0.75  # share of demonstrations whose first number belongs to the prompt
EXAMINED = 4  # number of problems in an examination of the base policy
ENOUGH = 0.3  # the share of right answers that the base policy must reach


@dataclass(frozen=True)
class Lesson:
    steps: int
    learning_rate: float
    warmup_steps: int
    wrong: float  # share of demonstrations with wrong digits


LESSONS = (Lesson(450, 3e-3, WARMUP_STEPS, 0.0), Lesson(200, 1e-3, 0, 0.25))


class ManyAnswers:
    name = "many-answers"

    def __init__(self, config: TaskConfig): ...

    def source(self, split: str) -> str:
        return ""

    def prompts(
        self, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int
    ) -> list[Prompt]:
        chosen = sums(split)
        tokens = tokenizer([prompt_of(total) for total in chosen]).input_ids
        return [
            Prompt(prompt_id=f"{split}-{total}", text=prompt_of(total), tokens=tuple(ids), answer=str(total))
            for total, ids in zip(chosen, tokens, strict=True)
        ]

    def right_answers(self, total: int) -> list[str]:
        return right_answers(total)

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        return Reward(value=float(response.finished and is_right(response.text, int(prompt.answer))))

    def recipe(self) -> str:
        here, quickstart = Path(__file__), Path(quickstart_problems.__file__)
        sources = [here, quickstart, quickstart.with_name("quickstart_policy.py")]
        digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
        return f"many-answers {digest} torch {version('torch')} transformers {version('transformers')}"

    def base_policy(self, folder: Path, *, seed: int, report: Callable[[str, float], None]) -> None:
        """Write the base policy as a Hugging Face folder. This takes about a minute on one core."""
        from tba.models.supervised import fine_tune
        from tba.tasks.quickstart_policy import encode, make_model, make_tokenizer

        model, done, steps = make_model(seed), 0, sum(lesson.steps for lesson in LESSONS)
        for n, lesson in enumerate(LESSONS):
            shown = taught(f"{seed}:{n}", wrong=lesson.wrong)
            batches = ([encode(*it) for it in islice(shown, BATCH)] for _ in count())
            training = fine_tune(
                model, batches, steps=lesson.steps, learning_rate=lesson.learning_rate, warmup_steps=lesson.warmup_steps
            )
            for _ in training:
                done += 1
                report(f"making the base policy: {done} of {steps} steps", done / steps)
        if (right := _share_right(model)) < ENOUGH:
            raise RunFailed(f"the base policy is right {right:.0%} of the time after {steps} steps: try another seed")
        model.save_pretrained(folder)
        make_tokenizer().save_pretrained(folder)


def prompt_of(total: int) -> str:
    return f"{units_first(total)}="


def is_right(text: str, total: int) -> bool:
    left, plus, right = text[:3], text[3:4], text[4:]
    if plus != "+" or not all(len(it) == 3 and it.isascii() and it.isdigit() for it in (left, right)):
        return False
    return int(left[::-1]) + int(right[::-1]) == total


def right_answers(total: int) -> list[str]:
    """Return all right answers, ordered by their first numbers."""
    return [_answer(left, total - left) for left in range(total + 1)]


@cache
def sums(split: str) -> tuple[int, ...]:
    """Return the sums that the problems of a split ask for, in a seeded order. No sum is in both splits."""
    drawn = random.Random("many-answers").sample(range(LEAST, MOST + 1), MOST + 1 - LEAST)
    return tuple({"test": drawn[:TEST_PROMPTS], "train": drawn[TEST_PROMPTS:]}[split])


def demonstrations(seed: int | str, *, wrong: float) -> Iterator[tuple[str, str]]:
    """Yield endless pairs of a prompt and a response. A random share `wrong` of the responses has wrong digits."""
    rng = random.Random(f"many-answers:{seed}")
    while True:
        total = rng.choice(sums("train"))
        left = rng.randint(0, total)
        second = _digits(total - left)
        if rng.random() < wrong:
            second = with_wrong_digits(second, rng)
        yield prompt_of(total), f"{_digits(left)}+{second}"


def taught(seed: int | str, *, wrong: float) -> Iterator[tuple[str, str]]:
    """Yield demonstrations. In a random share `GIVEN` of them, the first number and the plus belong to the prompt."""
    rng = random.Random(f"many-answers, given:{seed}")
    for prompt, response in demonstrations(seed, wrong=wrong):
        first = 4 if rng.random() < GIVEN else 0
        yield prompt + response[:first], response[first:]


def _share_right(model: "LlamaForCausalLM") -> float:
    """Return the probability of a right answer, the mean over `EXAMINED` training problems."""
    from tba.models.supervised import probabilities
    from tba.tasks.quickstart_policy import encode

    examined = sums("train")[:: len(sums("train")) // EXAMINED]
    examination = [encode(prompt_of(total), answer) for total in examined for answer in right_answers(total)]
    return probabilities(model, examination).sum().item() / len(examined)


def _answer(left: int, right: int) -> str:
    return f"{_digits(left)}+{_digits(right)}"


def _digits(number: int) -> str:
    return f"{number:03}"[::-1]
