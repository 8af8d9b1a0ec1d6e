"""Summaries: prompts, the reward by a tiny reward model, and the measures by a tiny gold one."""

import math
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from benchmarks.harness.tiny_models import EOS, tiny_tokenizer
from tba.config import TaskConfig
from tba.errors import ConfigError, DataError
from tba.interfaces import Measures, ScoresTogether, UsesModels
from tba.models.judge import Judge
from tba.presets import preset
from tba.tasks.registry import get_task
from tba.tasks.tldr import TLDR
from tba.types import Prompt, Response, Version
from tests.support.models.judges import classifier

POST = "SUBREDDIT: r/pens\n\nPOST: I lost a pen.\n\nTL;DR:"
ROWS = [
    {"query": POST, "reference_response": " lost pen<|endoftext|>", "query_token": [1, 2]},
    {"query": f"{'A longer post. ' * 9}\n\nTL;DR:", "reference_response": " it is long <|endoftext|>"},
    {"query": "TITLE: short\n\nTL;DR:", "reference_response": "short"},
]


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return a reward model and a gold model that disagree."""
    folder = tmp_path_factory.mktemp("judges")
    return {
        name: str(classifier(folder / name, "decoder", 1, seed=seed, positions=512))
        for seed, name in enumerate(("reward_model", "gold_model"))
    }


def tldr(options: dict[str, Any]) -> TLDR:
    task = get_task(TaskConfig(name="tldr", options={"device": "cpu", **options}))
    assert isinstance(task, TLDR)
    return task


def prompts(task: TLDR) -> list[Prompt]:
    return task.prompts("test", ROWS, tiny_tokenizer(), max_tokens=1000)


def respond(text: str, *, finished: bool = True, logp: float = -1.0) -> Response:
    tokens = tuple(tiny_tokenizer()(text + EOS * finished).input_ids)
    return Response(
        tokens=tokens, logps=(logp,) * len(tokens), text=text, finished=finished, temperature=0.7, top_p=1.0, seed=0,
        version_start=Version(0, 1), version_end=Version(0, 1), generate_seconds=0.1,
    )  # fmt: skip


@cache
def judge(folder: str) -> Judge:
    return Judge.load("x", folder, device="cpu")


def score(folder: str, text: str) -> float:
    return float(judge(folder).logits([text])[0, 0])


# --- Prompts ---


def test_a_prompt_is_the_post_up_to_the_summary_and_its_answer_what_a_human_wrote():
    task, tokenizer = get_task("tldr"), tiny_tokenizer()
    found = task.prompts("test", ROWS, tokenizer, max_tokens=1000)
    assert [prompt.text for prompt in found] == [row["query"] for row in ROWS]
    assert [prompt.tokens for prompt in found] == [tuple(tokenizer(row["query"]).input_ids) for row in ROWS]
    assert [prompt.answer for prompt in found] == ["lost pen", "it is long", "short"]
    assert [prompt.prompt_id for prompt in found] == ["test-000000", "test-000001", "test-000002"]


def test_posts_that_are_too_long_are_left_out_and_the_others_keep_their_names():
    found = get_task("tldr").prompts("train", ROWS, tiny_tokenizer(), max_tokens=len(POST))
    assert [prompt.prompt_id for prompt in found] == ["train-000000", "train-000002"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"reference_response": "x"}, "train row 1: field 'query' must be text"),
        ({"query": POST, "reference_response": 3}, "train row 1: field 'reference_response' must be text"),
        (
            {"query": POST, "reference_response": " <|endoftext|>"},
            "train row 1: field 'reference_response' contains only",
        ),
    ],
)
def test_a_malformed_row_is_named_with_its_field(row: dict[str, object], says: str):
    with pytest.raises(DataError, match=says):
        get_task("tldr").prompts("train", [ROWS[0], row], tiny_tokenizer(), max_tokens=1000)


# --- Settings ---


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"options": {"reward_modl": "x"}}, "unknown setting 'task.options.reward_modl'"),
        ({"options": {"reward_model": ""}}, "task.options.reward_model must have at least 1 character"),
        ({"options": {"no_eos_reward": "low"}}, "task.options.no_eos_reward must be .*got 'low'"),
        ({"options": {"dtype": "float16"}}, "task.options.dtype must be .*got 'float16'"),
        ({"rule": "best"}, "task.rule must be empty: .*got 'best'"),
        ({"template": "short"}, "task.template must be empty: .*got 'short'"),
    ],
)
def test_a_bad_setting_is_refused_by_name(change: dict[str, Any], says: str):
    with pytest.raises(ConfigError, match=says):
        get_task(TaskConfig(name="tldr", **change))


def test_the_preset_judges_with_the_papers_models():
    options = tldr(dict(preset("tldr").task.options)).options
    assert options.reward_model == "mnoukhov/pythia410m-rm-tldr6.9b"
    assert options.gold_model == "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr"
    assert options.no_eos_reward == -1.0


def test_a_classifier_of_several_labels_is_no_reward_model(tmp_path: Path):
    task = tldr({"reward_model": str(classifier(tmp_path, "decoder", 2))})
    with pytest.raises(ConfigError, match=r"task\.options\.reward_model must be a model with 1 logit, got one with 2"):
        task.load(lambda setting, place: place)


# --- Rewards ---


def test_the_reward_is_the_score_of_post_and_summary_with_their_end(judges: dict[str, str]):
    task = tldr(judges)
    prompt = prompts(task)[0]
    reward = task.reward(prompt, respond(" a pen is gone"))
    assert reward.value == pytest.approx(score(judges["reward_model"], f"{POST} a pen is gone{EOS}"), abs=1e-5)
    assert abs(reward.value - score(judges["reward_model"], f"{POST} a pen is gone")) > 1e-3
    assert reward.parts == {"score": reward.value, "finished": 1.0}


@pytest.mark.parametrize("low", [-1.0, -7.5])
def test_a_summary_that_does_not_end_gets_the_fixed_reward_and_keeps_its_score_aside(
    judges: dict[str, str], low: float
):
    task = tldr({**judges, "no_eos_reward": low})
    reward = task.reward(prompts(task)[0], respond(" a pen is", finished=False))
    assert reward.value == low
    assert reward.parts["finished"] == 0.0
    assert reward.parts["score"] == pytest.approx(score(judges["reward_model"], f"{POST} a pen is"), abs=1e-5)


def test_rewards_together_are_those_of_each_alone_in_order(judges: dict[str, str]):
    task = tldr(judges)
    asked = [
        (prompt, respond(text, finished=bool(text)))
        for prompt in prompts(task)
        for text in (" one", "", " a much longer one")
    ]
    together = task.rewards(asked)
    assert [r.value for r in together] == pytest.approx([task.reward(p, r).value for p, r in asked], abs=1e-5)
    assert len({r.parts["score"] for r in together}) == len(asked)


def test_only_what_is_used_is_loaded_from_where_it_was_located(judges: dict[str, str]):
    task, sought = tldr({"reward_model": "s3://a/b", "gold_model": "s3://a/c"}), list[tuple[str, str]]()

    def locate(setting: str, place: str) -> str:
        sought.append((setting, place))
        return judges[setting.rpartition(".")[2]]

    task.load(locate)
    task.reward(prompts(task)[0], respond(" x"))
    assert sought == [("task.options.reward_model", "s3://a/b")]
    assert len(task.loaded_models()) == 1
    task.measures([(prompts(task)[0], respond(" x"))], [], None)
    assert sought[1:] == [("task.options.gold_model", "s3://a/c")]
    assert len(task.loaded_models()) == 2


# --- Measures ---


def test_it_is_a_task_that_scores_together_with_models_and_measures():
    task = get_task("tldr")
    assert isinstance(task, ScoresTogether) and isinstance(task, UsesModels)
    assert isinstance(task, Measures) and task.needs_reference


def test_a_win_is_a_gold_score_strictly_greater_than_that_of_the_humans_summary(judges: dict[str, str]):
    task = tldr(judges)
    asked = [
        (prompt, respond(f" {text}"))
        for prompt in prompts(task)
        for text in (prompt.answer, "no", "yes", "a pen", "something else", "42")
    ]
    gold = judges["gold_model"]
    wins = [
        score(gold, f"{p.text}{r.text}{EOS}") > score(gold, f"{p.text} {p.answer}{EOS}")
        for p, r in asked
        if r.text != f" {p.answer}"
    ]
    assert 0 < sum(wins) < len(wins)
    found = [task.measures(asked, [], None) for _ in range(2)]
    assert found == [{"win_rate": sum(wins) / len(asked)}] * 2  # a copy of the human's text is not a win


def test_the_gold_model_may_read_with_the_tokenizer_of_another(judges: dict[str, str], tmp_path: Path):
    """That tokenizer has no padding token, so texts are scored without an end token."""
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    task = tldr({**judges, "gold_tokenizer": "s3://a/tokenizer"})
    task.load(lambda setting, place: str(tmp_path) if setting == "task.options.gold_tokenizer" else place)
    asked = [(it, respond(f" {text}")) for it in prompts(task) for text in ("no", "yes", "a pen", "something", "42")]

    def wins(end: str) -> float:
        gold = judges["gold_model"]
        return fmean(score(gold, p.text + r.text + end) > score(gold, f"{p.text} {p.answer}{end}") for p, r in asked)

    assert task.measures(asked, [], None) == {"win_rate": wins("")} != {"win_rate": wins(EOS)}


def test_without_a_gold_model_there_is_no_win_rate(judges: dict[str, str]):
    task = tldr({"reward_model": judges["reward_model"], "gold_model": ""})
    assert task.measures([(prompts(task)[0], respond(" x"))], [], None) == {}


def test_what_is_measured_against_the_reference_is_what_the_formulas_say(judges: dict[str, str]):
    """Three and six tokens, ends included, have log-probabilities of -2 and -3 each under the reference and -1 under
    the policy."""
    task = tldr({"reward_model": judges["reward_model"], "gold_model": ""})
    first, _, third = prompts(task)
    asked = [(first, respond(" x")), (third, respond(" four", finished=False)), (third, respond(" five"))]
    ref_logps = [(-2.0,) * 3, (-3.0,) * 5, (-3.0,) * 6]
    found = task.measures(asked, [], ref_logps)
    assert found["kl"] == pytest.approx((3 * 1 + 5 * 2 + 6 * 2) / 3)
    assert found["perplexity"] == pytest.approx(math.exp((6 + 15 + 18) / 14))
    n1, n3 = len(first.tokens), len(third.tokens)
    diluted = [math.exp(6 / (n1 + 2)), math.exp(15 / (n3 + 4)), math.exp(18 / (n3 + 5))]
    assert found["diluted_perplexity"] == pytest.approx(sum(diluted) / 3)


def test_a_post_that_does_not_end_as_all_others_counts_one_in_the_published_perplexity(judges: dict[str, str]):
    task = tldr({"reward_model": judges["reward_model"], "gold_model": ""})
    row = {"query": "A post without end", "reference_response": "x"}
    (prompt,) = task.prompts("test", [row], tiny_tokenizer(), max_tokens=1000)
    found = task.measures([(prompt, respond(" x"))], [], [(-5.0,) * 3])
    assert found["diluted_perplexity"] == 1.0 and found["perplexity"] == pytest.approx(math.exp(5))
