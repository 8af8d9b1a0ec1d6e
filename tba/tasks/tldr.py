"""Summaries of posts. A reward model, trained on human preferences, scores a post together with its summary; the score
is the reward. A summary that does not end within the limit gets a fixed low reward. In evaluations, a gold model
decides whether a summary is better than the one that a human wrote."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from tba.config import TaskConfig, parse_options, settings
from tba.errors import ConfigError, DataError
from tba.interfaces import Locate, UsedModel
from tba.tasks.fields import text_in
from tba.types import Prompt, Response, Reward

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tba.models.judge import Judge

DATA = "hf://datasets/vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144/data"
FILES = {"train": "train-*.parquet", "test": "validation-*.parquet"}
END = "<|endoftext|>"  # the end of a human's summary in the data
MARKER = "TL;DR:"  # the end of a post in the data


@settings
class Options:
    reward_model: Annotated[str, Field(min_length=1)] = "mnoukhov/pythia410m-rm-tldr6.9b"
    """The reward model, a sequence classifier with one logit: a folder, a URL or a name on the Hugging Face hub. The
    default is the paper's reward model for Pythia-410M."""
    gold_model: str = "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr"
    """The gold model, which decides the win rate in evaluations: a sequence classifier with one logit, named like
    `reward_model`. Empty measures no win rate."""
    gold_tokenizer: str = ""
    """The tokenizer of the gold model: a folder, a URL or a name on the Hugging Face hub. Empty takes the tokenizer
    that is stored with the gold model."""
    device: str = "auto"
    """Device of reward model and gold model. `auto` uses a GPU if there is one."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights of reward model and gold model."""
    no_eos_reward: float = -1.0
    """Reward of a response that does not end within `search.max_response_tokens`."""


class TLDR:
    """The task of summarising posts, with the prompts, the reward and the measures of the paper."""

    name = "tldr"
    fields = ("query", "reference_response")
    needs_reference = True

    def __init__(self, config: TaskConfig):
        for field in ("rule", "template"):
            if value := getattr(config, field):
                raise ConfigError(f"task.{field} must be empty: tldr has only one {field}, got {value!r}")
        self.options = parse_options(Options, config)
        self._locate: Locate = lambda setting, place: place
        self._judges: dict[str, Judge] = {}
        self._gold_scores: dict[tuple[str, bool], float] = {}  # of humans' summaries, kept for all evaluations

    def source(self, split: str) -> str:
        return f"{DATA}/{FILES[split]}"

    def prompts(
        self, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int
    ) -> list[Prompt]:
        """Make a prompt of each row. The row has a `query`, a post that ends in "TL;DR:", and a `reference_response`, a
        human's summary."""
        texts = [text_in(split, i, row, "query") for i, row in enumerate(rows)]
        summaries = [_summary(split, i, row) for i, row in enumerate(rows)]
        tokens = tokenizer(texts).input_ids if texts else []
        # The published perplexity splits a text at the marker. It is measured on `test` only.
        metadata = {"marker": tokenizer(MARKER, add_special_tokens=False).input_ids} if split == "test" else {}
        prompts = [
            Prompt(prompt_id=f"{split}-{i:06d}", text=text, tokens=tuple(ids), answer=summary, metadata=metadata)
            for i, (text, ids, summary) in enumerate(zip(texts, tokens, summaries, strict=True))
        ]
        return [prompt for prompt in prompts if len(prompt.tokens) <= max_tokens]

    def scoring_models(self) -> list[UsedModel]:
        options = self.options
        reward = UsedModel(options.reward_model, options.dtype, options.device)
        gold = UsedModel(options.gold_model, options.dtype, options.device, searches=False)
        return [reward, gold] if options.gold_model else [reward]

    def loaded_models(self) -> "list[PreTrainedModel]":
        return [judge.model for judge in self._judges.values()]

    def load(self, locate: Locate) -> None:
        """Load the reward model. The gold model is loaded at its first use, since only evaluators need it."""
        self._locate = locate
        self._judge("reward_model")

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        return self.rewards([(prompt, response)])[0]

    def rewards(self, asked: Sequence[tuple[Prompt, Response]]) -> list[Reward]:
        scores = self._scores("reward_model", [(p.text + r.text, r.finished) for p, r in asked])
        return [
            Reward(
                value=score if response.finished else self.options.no_eos_reward,
                parts={"score": score, "finished": float(response.finished)},
            )
            for score, (_, response) in zip(scores, asked, strict=True)
        ]

    def measures(
        self,
        asked: Sequence[tuple[Prompt, Response]],
        rewards: Sequence[Reward],
        ref_logps: Sequence[Sequence[float]] | None,
    ) -> dict[str, float]:
        measured = {"win_rate": self._win_rate(asked)} if self.options.gold_model else {}
        if ref_logps is not None:
            diluted = [
                diluted_perplexity(p.tokens, r.tokens, logps, p.metadata["marker"])
                for (p, r), logps in zip(asked, ref_logps, strict=True)
            ]
            measured["kl"] = mean_log_ratio([response.logps for _, response in asked], ref_logps)
            measured["perplexity"] = perplexity(ref_logps)
            measured["diluted_perplexity"] = sum(diluted) / len(diluted)
        return measured

    def _win_rate(self, asked: Sequence[tuple[Prompt, Response]]) -> float:
        """Return the share of responses that the gold model scores higher than the human's summary of the same post. A
        response with the same words as the human's summary never wins, though its score may be higher by rounding."""
        humans = [(f"{prompt.text} {prompt.answer}", True) for prompt, _ in asked]
        if new := [text for text in dict.fromkeys(humans) if text not in self._gold_scores]:
            self._gold_scores.update(zip(new, self._scores("gold_model", new), strict=True))
        texts = [(prompt.text + response.text, response.finished) for prompt, response in asked]
        scores = self._scores("gold_model", texts)
        wins = [
            score > self._gold_scores[human] and text != human
            for score, text, human in zip(scores, texts, humans, strict=True)
        ]
        return sum(wins) / len(wins)

    def _scores(self, name: str, texts: Sequence[tuple[str, bool]]) -> list[float]:
        """Return the scores that the reward model or the gold model gives to texts. Each text comes with a bool that
        says whether the text has ended. The models score a text at its last token, so the end token is appended to
        texts that have ended."""
        judge = self._judge(name)
        end = judge.tokenizer.eos_token or ""
        return judge.logits([f"{text}{end}" if ended else text for text, ended in texts])[:, 0].tolist()

    def _judge(self, name: str) -> "Judge":
        if name not in self._judges:
            from tba.models.judge import Judge

            judge = Judge.load(
                f"task.options.{name}",
                self._at(name),
                tokenizer_path=self._at("gold_tokenizer")
                if name == "gold_model" and self.options.gold_tokenizer
                else None,
                device=self.options.device,
                device_setting="task.options.device",
                dtype=self.options.dtype,
            )
            if judge.labels != 1:
                raise ConfigError(f"task.options.{name} must be a model with 1 logit, got one with {judge.labels}")
            self._judges[name] = judge
        return self._judges[name]

    def _at(self, name: str) -> Any:
        return self._locate(f"task.options.{name}", getattr(self.options, name))


def _summary(split: str, index: int, row: Mapping[str, Any]) -> str:
    summary = text_in(split, index, row, "reference_response").strip().removesuffix(END).rstrip()
    if not summary:
        raise DataError(f"{split} row {index}: field 'reference_response' contains only {END!r}")
    return summary


# --- how far responses are from the reference -------------------------------------------------------------------------
# Log-probabilities are natural logarithms. There is one log-probability for each token of a response, including its end
# token.


def mean_log_ratio(logps: Sequence[Sequence[float]], ref_logps: Sequence[Sequence[float]]) -> float:
    """Return the mean over responses of log pi - log pi_ref, each of a whole response. If the responses are sampled
    from pi, this is an unbiased estimate of KL(pi || pi_ref)."""
    return sum(math.fsum(own) - math.fsum(ref) for own, ref in zip(logps, ref_logps, strict=True)) / len(logps)


def perplexity(logps: Sequence[Sequence[float]]) -> float:
    """Return exp of the mean negative log-probability over all tokens of all responses; 1 if there are no tokens."""
    tokens = sum(len(row) for row in logps)
    return _exp(-math.fsum(logp for row in logps for logp in row) / max(1, tokens))


def diluted_perplexity(
    prompt: Sequence[int], response: Sequence[int], logps: Sequence[float], marker: Sequence[int]
) -> float:
    """Return the perplexity of one summary as Async RLHF, and TBA after it, published it. The negative log-probability
    of the summary is divided by the number of all tokens, those of the prompt included, less 1. This is misleading;
    `perplexity` divides by the number of tokens of the responses instead.

    The summary is the text after the last `marker`, even if the policy wrote this marker itself. A text without a
    marker has perplexity 1.
    """
    text = (*prompt, *response)
    begin = _end_of_last(marker, text)
    if begin is None:
        return 1.0
    counted = logps[max(0, begin - len(prompt)) :]
    return _exp(-math.fsum(counted) / max(1, len(text) - 1))


def _end_of_last(marker: Sequence[int], text: Sequence[int]) -> int | None:
    sought = tuple(marker)
    return next((i for i in range(len(text), len(sought) - 1, -1) if text[i - len(sought) : i] == sought), None)


def _exp(exponent: float) -> float:
    return math.exp(min(exponent, 700.0))  # a larger exponent would overflow
