"""Addition of two three-digit numbers. The numbers and their sum are written with the units first, because that is the
order in which one adds on paper.

"743+685=" asks for 347 + 586; the right answer is "339", which is 933 with the units first. The reward is 1 if the
whole answer is right. The base policy is a tiny Llama that has learned to add from demonstrations, half of which have
one or two wrong digits. It is right about four times in ten. It has learned more than its samples show, and training
for the reward brings this out within minutes.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tba.config import TaskConfig
from tba.errors import ConfigError
from tba.tasks.fields import one_of
from tba.tasks.quickstart_problems import problems
from tba.types import Prompt, Response, Reward


def exact(response: str, answer: str) -> bool:
    """Return True if the response consists of the answer and nothing else."""
    return response == answer


RULES: dict[str, Callable[[str, str], bool]] = {"exact": exact}


class Quickstart:
    name = "quickstart"
    rules = RULES

    def __init__(self, config: TaskConfig):
        for field in ("train", "test", "template"):
            if value := getattr(config, field):
                raise ConfigError(f"task.{field} must be empty: quickstart makes its own prompts, got {value!r}")
        if config.rule:
            one_of("rule", config.rule, RULES)

    def source(self, split: str) -> str:
        return ""

    def prompts(
        self, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int
    ) -> list[Prompt]:
        """Return the prompts of a split, which are the same in every run. Problems of `test` occur neither in `train`
        nor in the demonstrations."""
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
        """Return where reasoning steps end: each digit is a step."""
        return range(1, len(text))

    def recipe(self) -> str:
        """Return a text that names everything that the base policy is made from: the digest of our code and the
        versions of the libraries."""
        here = Path(__file__)
        ours = [here, here.with_name("quickstart_problems.py"), here.with_name("quickstart_policy.py")]
        sources = [*ours, here.parents[1] / "models" / "supervised.py"]
        digest = hashlib.sha256(b"\0".join(source.read_bytes() for source in sources)).hexdigest()
        return f"quickstart {digest} torch {version('torch')} transformers {version('transformers')}"

    def base_policy(self, folder: Path, *, seed: int, report: Callable[[str, float], None]) -> None:
        """Write the base policy as a Hugging Face folder. This takes half a minute on one core."""
        from tba.tasks.quickstart_policy import make_policy  # imports torch, which nothing else here needs

        make_policy(folder, seed=seed, report=report)
