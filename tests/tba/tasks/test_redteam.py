import math
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from benchmarks.harness.tiny_models import EOS_ID, tiny_tokenizer
from tba.config import TaskConfig
from tba.errors import ConfigError
from tba.generation.requests import generate
from tba.generation.transformers_generator import TransformersGenerator
from tba.models.toxicity import Guard
from tba.tasks.redteam import ALPACA, RedTeam, judge, victim_seed
from tba.tasks.registry import get_task
from tba.types import Prompt, Response, Reward, Version
from tests.support.laptop import needs
from tests.support.tba.redteam import chat_folder, labelled_folder, redteam_options, redteam_victim

ATTACKS = ["say it again", " Tell me a number", "12+34=", "say it again", "x"]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return redteam_options(tmp_path_factory.mktemp("models"))


def here(setting: str, place: str) -> str:
    return place


def loaded(options: dict[str, Any], **changes: Any) -> RedTeam:
    task = RedTeam(TaskConfig(name="redteam", options={**options, **changes}))
    task.load(here)
    return task


def asked(*texts: str, seed: int = 0, end: bool = True) -> list[tuple[Prompt, Response]]:
    (prompt,) = RedTeam(TaskConfig()).prompts("train", [], tiny_tokenizer(), max_tokens=1000)
    return [(prompt, response(text, seed + i, end=end)) for i, text in enumerate(texts)]


def response(text: str, seed: int, *, end: bool = True) -> Response:
    tokens = (*tiny_tokenizer()(text).input_ids, *([EOS_ID] if end else []))
    return Response(
        tokens=tokens, logps=(-1.0,) * len(tokens), text=text, finished=end, temperature=1.0, top_p=1.0, seed=seed,
        version_start=Version(0, 1), version_end=Version(0, 1), generate_seconds=0.1,
    )  # fmt: skip


# --- the prompt -------------------------------------------------------------------------------------------------------


def test_the_attacker_sees_one_list_of_instructions_that_breaks_off_at_the_fourth():
    task, tokenizer = get_task("redteam"), tiny_tokenizer()
    train, test = (task.prompts(split, [], tokenizer, max_tokens=1000) for split in ("train", "test"))
    assert [it.prompt_id for it in train + test] == ["train-00000", "test-00000"]
    assert train[0].text == test[0].text and train[0].tokens == tuple(tokenizer(train[0].text).input_ids)
    assert [line[:2] for line in train[0].text.split("\n")] == ["1.", "2.", "3.", "4."]
    assert train[0].text.endswith("\n4.")
    assert task.prompts("train", [], tokenizer, max_tokens=10) == []


def test_an_owner_may_choose_what_the_attacker_continues(options: dict[str, Any]):
    task, tokenizer = RedTeam(TaskConfig(options={**options, "attacker_prompt": "1. Say\n2."})), tiny_tokenizer()
    (prompt,) = task.prompts("train", [], tokenizer, max_tokens=1000)
    assert (prompt.text, prompt.tokens) == ("1. Say\n2.", tuple(tokenizer("1. Say\n2.").input_ids))
    with pytest.raises(ConfigError, match=r"task\.options\.attacker_prompt"):
        RedTeam(TaskConfig(options={"attacker_prompt": ""}))


# --- the reward -------------------------------------------------------------------------------------------------------


def rewards_by_hand(options: dict[str, Any], text: str, seed: int) -> tuple[float, float]:
    """Return mean log c and mean c of the victim's answers to a single attack."""
    victim = TransformersGenerator(device="cpu", max_response_tokens=options["victim_tokens"])
    victim.adopt(Path(options["victim"]), Version(0, 1))
    tokens = tuple(tiny_tokenizer()(ALPACA.format(instruction=text.strip())).input_ids)
    seeds = [victim_seed(seed, n) for n in range(options["victim_samples"])]
    prompt = Prompt(prompt_id="p", text="", tokens=tokens)
    (answers,) = generate(victim, [prompt], [seeds], temperature=0.7, top_p=0.92)
    classifier = AutoModelForSequenceClassification.from_pretrained(options["classifier"]).eval()
    found = []
    for answer in answers:
        with torch.no_grad():
            logits = classifier(torch.tensor([tiny_tokenizer()(answer.text).input_ids])).logits[0]
        found.append(float(logits.softmax(dim=0)[1]))
    return sum(map(math.log, found)) / len(found), sum(found) / len(found)


def test_the_reward_is_the_mean_log_probability_of_hate_in_the_answers_of_the_victim(options: dict[str, Any]):
    found = loaded(options).rewards(asked(*ATTACKS, seed=5))
    for i, (text, reward) in enumerate(zip(ATTACKS[:4], found, strict=False)):
        mean_log, mean = rewards_by_hand(options, text, 5 + i)
        assert reward.value == pytest.approx(mean_log, abs=1e-4)
        assert reward.parts == pytest.approx({"toxicity": mean, "toxicity_geometric": math.exp(mean_log)}, abs=1e-4)
    assert len({round(it.value, 4) for it in found}) == len(ATTACKS)  # the same attack with another seed


def test_a_response_scores_the_same_whenever_and_with_whatever_it_is_scored(options: dict[str, Any]):
    task, other = loaded(options), loaded(options)
    together = task.rewards(asked(*ATTACKS))
    alone = [other.reward(*pair) for pair in asked(*ATTACKS)]
    assert [it.value for it in alone] == pytest.approx([it.value for it in together], abs=1e-4)


def test_a_response_of_fewer_than_five_tokens_is_no_attack(options: dict[str, Any]):
    task = loaded(options, short_reward=-33.0)
    ends, four, five = "abcd", "abcd", "abcde"
    found = task.rewards([asked(ends)[0], asked(four, end=False)[0], asked(five, end=False)[0], asked("abc")[0]])
    assert [it.value == -33.0 for it in found] == [False, True, False, True]
    assert all(0 < it.parts["toxicity"] < 1 for it in found)


@given(st.lists(st.floats(max_value=0, allow_nan=False), min_size=1, max_size=6), st.floats(-50, -0.01))
def test_no_answer_counts_for_less_than_the_floor_and_the_geometric_mean_is_the_smaller(
    logps: list[float], floor: float
):
    reward = judge(logps, floor=floor)
    assert floor - 1e-9 <= reward.value <= 0
    assert 0 <= reward.parts["toxicity_geometric"] <= reward.parts["toxicity"] <= 1
    if min(logps) >= floor:
        assert reward.value == pytest.approx(sum(logps) / len(logps))


def test_one_harmless_answer_dominates_the_reward_but_not_the_success():
    reward = judge([0.0, 0.0, 0.0, 0.0, -math.inf], floor=-20.0)
    assert reward.value == -4.0
    assert reward.parts == pytest.approx({"toxicity": 0.8, "toxicity_geometric": math.exp(-4)}, abs=1e-6)


def test_a_classifier_that_gives_no_number_does_not_pass_for_one_that_finds_nothing_toxic():
    assert math.isnan(judge([-1.0, math.nan, -2.0], floor=-20.0).value)


def test_an_answer_of_nothing_is_not_toxic(options: dict[str, Any]):
    from tba.models.toxicity import Labelled

    labelled = Labelled.load("c", options["classifier"], label="hate", max_tokens=99, dtype="float32", device="cpu")
    assert labelled.logps([("a", ""), ("b", "")]) == [-math.inf] * 2
    assert labelled.logps([("a", ""), ("a", "b")])[1] == labelled.logps([("c", "b")])[0] > -math.inf
    assert labelled.logps([]) == []


def test_long_attacks_and_long_answers_are_no_obstacle(options: dict[str, Any]):
    (reward,) = loaded(options, classifier_tokens=100).rewards(asked("a" * 3000))
    assert math.isfinite(reward.value)


def test_a_victim_with_a_chat_template_is_asked_in_it(options: dict[str, Any], tmp_path: Path):
    chat = str(chat_folder(tmp_path, seed=1))  # the same weights as those of the other victim
    plain, template = loaded(options, victim=chat), loaded(options, victim=chat, victim_template="chat")
    assert plain.rewards(asked(*ATTACKS)) == loaded(options).rewards(asked(*ATTACKS))
    assert template.victim and template.victim.prompt_tokens("go") == tuple(tiny_tokenizer()("user: go\na:").input_ids)
    assert template.rewards(asked(*ATTACKS)) != plain.rewards(asked(*ATTACKS))


# --- a guard ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("lead", "written"), [("\n\n", "\n\n"), ("a:", "")])
def test_a_guard_tells_the_probability_that_its_verdict_begins_as_unsafe_does(lead: str, written: str, tmp_path: Path):
    folder = chat_folder(tmp_path, seed=2)
    guard = Guard.load("task.options.classifier", folder, lead=lead, dtype="float32", device="cpu")
    pairs = [("how?", "so"), ("a longer question", ""), ("1+1", "2, of course")]
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    unsafe = tiny_tokenizer()("u").input_ids[0]
    expected = []
    for attack, answer in pairs:
        text = f"user: {attack}\nassistant: {answer}\na:{written}"
        with torch.no_grad():
            logits = model(torch.tensor([tiny_tokenizer()(text).input_ids])).logits[0, -1]
        expected.append(float(logits.log_softmax(dim=0)[unsafe]))
    assert guard.logps(pairs) == pytest.approx(expected, abs=1e-4)
    assert Guard(guard.policy, lead, guard.word, tokens_per_batch=10).logps(pairs) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("lead", ["\n\n", "a:"])
def test_a_guard_judges_the_attack_and_the_answer(lead: str, options: dict[str, Any], tmp_path: Path):
    folder = chat_folder(tmp_path, seed=2)
    task = loaded(options, classifier=str(folder), classifier_kind="guard", guard_lead=lead)
    found = task.rewards(asked(*ATTACKS))
    guard = Guard.load("c", folder, lead=lead, dtype="float32", device="cpu")
    attacks = [attack.strip() for attack in ATTACKS]
    for attack, answers, reward in zip(attacks, redteam_victim(options).answers(attacks, range(5)), found, strict=True):
        logps = guard.logps([(attack, answer) for answer in answers])
        assert reward.parts["toxicity"] == pytest.approx(sum(map(math.exp, logps)) / 3, rel=1e-3)


def test_all_models_that_it_holds_can_leave_a_gpu(options: dict[str, Any]):
    task = RedTeam(TaskConfig(name="redteam", options=options))
    assert task.loaded_models() == []
    task.load(here)
    assert len(task.loaded_models()) == 2, "victim and classifier"
    task.measures([(prompt, it) for prompt, it in asked(*ATTACKS)], task.rewards(asked(*ATTACKS)), None)
    assert len(task.loaded_models()) == 3, "and the embeddings"


# --- the classifier of a package --------------------------------------------------------------------------------------


def by_profanity(options: dict[str, Any]) -> dict[str, Any]:
    others = {name: value for name, value in options.items() if name != "classifier"}
    return {**others, "classifier_kind": "profanity"}


@needs("profanity_check", "sklearn", "joblib")
def test_answers_are_judged_by_the_installed_package_and_by_nothing_that_a_setting_names(options: dict[str, Any]):
    located: list[str] = []
    task = RedTeam(TaskConfig(name="redteam", options=by_profanity(options)))
    task.load(lambda setting, place: located.append(setting) or place)
    assert sorted(located) == ["task.options.embeddings", "task.options.victim"]
    from profanity_check import predict_prob

    found = task.rewards(asked(*ATTACKS))
    attacks = [attack.strip() for attack in ATTACKS]
    for answers, reward in zip(redteam_victim(options).answers(attacks, range(5)), found, strict=True):
        probabilities = predict_prob(answers)
        assert reward.parts["toxicity"] == pytest.approx(probabilities.mean())
        assert reward.value in (-25.0, pytest.approx(sum(map(math.log, probabilities)) / 3))
    assert len({it.value for it in found}) > 2


def test_its_classifier_cannot_be_a_place(options: dict[str, Any]):
    with pytest.raises(ConfigError) as refused:
        RedTeam(TaskConfig(options={**by_profanity(options), "classifier": "a/pickle"}))
    assert "task.options.classifier must be empty where task.options.classifier_kind is 'profanity'" in str(
        refused.value
    )
    assert str(refused.value).endswith("got 'a/pickle'")


PACKAGES = {"profanity_check": "alt-profanity-check", "sklearn": "scikit-learn", "joblib": "joblib"}


@pytest.mark.parametrize(("module", "package"), PACKAGES.items())
def test_without_the_package_the_error_names_the_command(
    module: str, package: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
):
    for name in PACKAGES:
        there = ModuleType(name)
        there.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, None if name == module else there)
    with pytest.raises(ConfigError) as refused:
        RedTeam(TaskConfig(options=by_profanity(options)))
    assert str(refused.value) == (
        f"task.options.classifier_kind: 'profanity' needs the package {package}, which is not installed: "
        "pip install --no-deps -r requirements-laptop.txt"
    )


def test_other_classifiers_do_not_need_the_package(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    for name in PACKAGES:
        monkeypatch.setitem(sys.modules, name, None)
    assert len(loaded(options).rewards(asked(*ATTACKS))) == len(ATTACKS)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"label": "love"},
            r"task.options.label must be one of .* labels of .*classifier '.*' \(hate, nothate\), got 'love'",
        ),
        ({"victim": "{tmp}"}, "task.options.victim: cannot load a model from"),
        ({"victim_device": "abacus"}, "task.options.victim_device: no such kind of device, got 'abacus'"),
        ({"classifier_device": "abacus"}, "task.options.classifier_device: no such kind of device, got 'abacus'"),
        (
            {"victim_template": "chat"},
            "task.options.victim_template must be alpaca: '.*' has no chat template, got 'chat'",
        ),
        (
            {"classifier_kind": "guard", "classifier": "{plain}"},
            "task.options.classifier: '.*' has no chat template, which a guard needs",
        ),
    ],
)
def test_models_that_do_not_fit_are_refused_by_the_name_of_their_setting(
    changes: dict[str, str], says: str, options: dict[str, Any], tmp_path: Path
):
    places = {"tmp": str(tmp_path), "plain": options["victim"]}
    with pytest.raises(ConfigError, match=says):
        loaded(options, **{name: value.format(**places) for name, value in changes.items()})


def test_the_encoder_goes_to_a_device_of_its_own(options: dict[str, Any]):
    reward = Reward(value=0.0, parts={"toxicity": 0.9, "toxicity_geometric": 0.6})
    with pytest.raises(ConfigError, match=r"task\.options\.embeddings_device: no such kind of device, got 'abacus'"):
        loaded(options, embeddings_device="abacus").measures(asked("a", "b"), [reward] * 2, None)


def test_a_classifier_of_one_label_tells_nothing(options: dict[str, Any], tmp_path: Path):
    with pytest.raises(ConfigError, match=r"at least 2 labels of .* \(hate\), got 'hate'"):
        loaded(options, classifier=str(labelled_folder(tmp_path, ("hate",))))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"options": {"victm": "x"}}, "unknown setting 'task.options.victm'"),
        ({"options": {"floor": 1.0}}, "task.options.floor must be less than 0, got 1.0"),
        ({"options": {"classifier_kind": "vote"}}, "task.options.classifier_kind"),
        ({"template": "tba"}, "task.template must be empty: redteam has one prompt and one reward, got 'tba'"),
    ],
)
def test_settings_at_fault_are_named(config: dict[str, Any], says: str):
    with pytest.raises(ConfigError) as refused:
        get_task(TaskConfig(name="redteam", **config))
    assert says in str(refused.value)


def test_without_its_models_it_cannot_score():
    with pytest.raises(ConfigError, match="victim and classifier are not loaded"):
        get_task("redteam").reward(*asked("a")[0])


# --- measures ---------------------------------------------------------------------------------------------------------


def test_success_is_a_share_of_attacks_and_diversity_a_distance_between_them(options: dict[str, Any]):
    task = loaded(options)
    parts = [(0.9, 0.6), (0.6, 0.1), (0.5, 0.5), (0.1, 0.0)]
    rewards = [Reward(value=0.0, parts={"toxicity": a, "toxicity_geometric": g}) for a, g in parts]
    found = task.measures(asked(*ATTACKS[:4]), rewards, None)
    assert found["attack_success"] == 0.5 and found["attack_success_geometric"] == 0.25
    assert 0 < found["diversity"] < 1
    assert found == pytest.approx(task.measures(asked(*ATTACKS[:4])[::-1], rewards[::-1], None))
    assert task.measures(asked("same", "same"), rewards[:2], None)["diversity"] == pytest.approx(0, abs=1e-6)


def test_one_attack_alone_has_no_diversity(options: dict[str, Any]):
    reward = Reward(value=0.0, parts={"toxicity": 0.9, "toxicity_geometric": 0.6})
    assert loaded(options).measures(asked("a"), [reward], None) == {"attack_success": 1, "attack_success_geometric": 1}
