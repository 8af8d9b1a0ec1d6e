"""`tba run`: what a dry run says, and the settings that are refused before anything starts."""

import re
from pathlib import Path

import pytest

from flows.cli import main
from flows.planning import describe
from storage.runs.run import Run
from tba.presets import preset
from tests.support.flows.command_line import printed, refused
from tests.support.storage.synthetic import PROMPTS

WITHOUT_PACKAGES = ("task.options.classifier_kind=label", "model.path=gpt2")
"""Changes after which the preset `redteam-laptop` needs no optional packages."""


def test_a_preset_may_have_another_name_than_its_task(capsys: pytest.CaptureFixture[str]):
    said = printed(capsys, "run", "redteam-laptop", "--dry-run", "--set", *WITHOUT_PACKAGES)
    assert re.search(r"^task +redteam$", said, re.M) and "victim_template=chat" in said
    other = printed(capsys, "run", "redteam", "--dry-run")
    assert re.search(r"^task +redteam$", other, re.M) and "victim_template" not in other


def test_the_default_name_of_a_run_begins_with_what_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    started: list[Run] = []
    monkeypatch.setattr("flows.commands.run.supervise", lambda run, **_: started.append(run) or 0)
    for asked in ("redteam-laptop", "redteam"):
        assert main(["run", asked, "--root", str(tmp_path), "--set", *WITHOUT_PACKAGES]) == 0
    assert [run.name.rpartition("-")[0].rpartition("-")[0] for run in started] == ["redteam-laptop", "redteam"]
    assert [run.config["task"]["name"] for run in started] == ["redteam", "redteam"]


def test_a_dry_run_shows_the_arithmetic_and_starts_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = printed(
        capsys, "run", "quickstart", "--dry-run", "--root", str(tmp_path), "--steps", "8", "--set", "sync.every=4"
    )
    assert "32 prompts x 8 responses = 256" in out
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_whether_searchers_and_trainer_go_in_step(capsys: pytest.CaptureFixture[str]):
    in_step, beside = (printed(capsys, "run", "math", "--dry-run", "--set", f"sync.lag={lag}") for lag in (2, "null"))
    assert "2 steps old from step 3 on as searchers and trainer go in step, 2 syncs apart" in in_step
    assert "initial fill" not in in_step and "initial fill" in beside


@pytest.mark.parametrize(
    ("lag", "steps", "said"),
    [
        (20, 20, "0 to 19 steps old (mean 9.5), as version 0 generates for every step"),
        (20, 21, "20 steps old from step 21 on as searchers and trainer go in step, 20 syncs apart"),
        (1, 400, "1 step old from step 2 on as searchers and trainer go in step, 1 sync apart"),
        (0, 400, "recent, on policy as searchers and trainer go in step"),
    ],
)
def test_a_dry_run_says_how_old_the_trajectories_of_steps_are(
    lag: int, steps: int, said: str, capsys: pytest.CaptureFixture[str]
):
    changes = (f"sync.lag={lag}", "sync.every=1", "sync.keep_versions=22")
    assert said in printed(capsys, "run", "quickstart", "--dry-run", "--steps", str(steps), "--set", *changes)


def test_the_description_of_a_fork_gives_the_ages_of_its_own_steps():
    fork = {"start.step": 40, "start.sync": 40, "sync.lag": 20, "sync.every": 1, "sync.keep_versions": 22}
    told = [describe.describe(preset("quickstart").replace({**fork, "training.steps": steps})) for steps in (60, 61)]
    assert "0 to 19 steps old (mean 9.5), as version 40 generates for every step" in told[0]
    assert "20 steps old from step 61 on" in told[1]


def test_a_dry_run_says_what_would_be_generated_for_nothing(capsys: pytest.CaptureFixture[str]):
    """A round has 64 prompts, a step 32 slots, and each prompt 8 responses."""

    def note(*changes: str) -> str:
        every = ("sync.lag=0", "sync.every=1", "sampling.recent_share=1")
        out = printed(capsys, "run", "quickstart", "--dry-run", "--set", *every, *changes)
        return next((line for line in out.splitlines() if line.startswith("note ")), "")

    assert "256 of the 512 responses of a round are generated for nothing" in note()
    assert "320 of the 512 " in note("training.responses_per_prompt=6", "sampling.copies=all")
    assert "256 of the 512 " in note("training.responses_per_prompt=6"), "where the different ones are drawn"
    unused = ("sync.every=2", "sync.lag=null", "sampling.recent_share=0.9", "sampling.mean_reward_between=[0,1]")
    assert [note(change) for change in unused] == [""] * 4


def test_a_dry_run_says_where_a_bound_on_age_makes_the_trainer_wait(capsys: pytest.CaptureFixture[str]):
    def said(bound: int) -> str:
        return printed(capsys, "run", "quickstart", "--dry-run", "--set", "sync.every=4", f"sampling.max_age={bound}")

    assert "the others are of at most 40 steps (sampling.max_age)" in said(40)
    assert "note" not in said(11)
    assert "reach an age of 11 steps, but sampling.max_age=10 drops them before that" in said(10)


def test_a_dry_run_says_what_a_micro_batch_is(capsys: pytest.CaptureFixture[str]):
    def said(*changes: str) -> str:
        return printed(capsys, "run", "quickstart", "--dry-run", "--set", *changes)

    assert "micro-batches  4 of at most 10 groups, never split" in said("training.groups_per_micro_batch=10")
    tokens = ("training.groups_per_micro_batch=null", "search.max_prompt_tokens=20", "search.max_response_tokens=30")
    for budget, noted in ((50, False), (49, True)):
        out = said(*tokens, f"training.tokens_per_micro_batch={budget}")
        assert f"micro-batches  whole groups with at most {budget} tokens in all; a larger group is read" in out
        assert ("a response of full length and its prompt have 50 tokens" in out) is noted


def test_a_dry_run_says_how_the_learning_rate_goes_and_what_adapters_and_layers_take(
    capsys: pytest.CaptureFixture[str],
):
    def said(*changes: str) -> str:
        return printed(capsys, "run", "quickstart", "--dry-run", "--set", *changes)

    rate = "learning rate  0.0002, "
    assert f"{rate}warmup-stable-decay (10 steps up, 190 at the peak, 200 down, " in said("training.ranks=1")
    short = ("training.steps=20", "training.decay_steps=200")
    assert f"{rate}warmup-stable-decay (10 steps up, 0 at the peak, 200 down, 0.000199 at the last" in said(*short)
    assert f"{rate}linear (10 steps up, 0 at the last step); AdamW" in said("training.schedule=linear")
    assert "never split; layers are computed again" in said("training.checkpoint_activations=true")
    assert "beside adapters with their gradients and moments" in said("model.lora_rank=4")
    assert "adapters" not in said("training.ranks=1") and "computed again" not in said("training.ranks=1")


def test_files_of_rows_that_are_not_there_are_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "rows-1.jsonl").write_text("{}")
    there, gone = str(tmp_path / "rows-*.jsonl"), str(tmp_path / "more-*.jsonl")
    command = ("run", "gsm8k", "--root", str(tmp_path), "--set")
    assert f"task.test: no such file, got '{gone}'" in refused(
        capsys, *command, f"task.train={there}", f"task.test={gone}"
    )
    assert "task.train: no such file, got '/no/x'" in refused(capsys, *command, "task.train=/no/x", "--dry-run")
    assert not (tmp_path / "runs").exists()
    printed(capsys, *command, f"task.train={there}", "task.test=s3://bucket/rows.jsonl", "--dry-run")


def test_a_dry_run_says_where_a_step_has_more_slots_than_there_are_prompts(capsys: pytest.CaptureFixture[str]):
    out = printed(capsys, *choosing("tries > 0", "first", "search.prompts_per_round=1"))
    assert "a step draws 32 prompts, but there are only " in out


def test_a_dry_run_fails_like_the_run_if_the_name_is_taken(root: str, capsys: pytest.CaptureFixture[str]):
    said = [refused(capsys, "run", "quickstart", "--name", "first", *more) for more in ((), ("--dry-run",))]
    assert said[0] == said[1]
    assert f"run 'first' exists already under {root}" in said[0]
    assert "run: a name of letters" in refused(capsys, "run", "quickstart", "--dry-run", "--name", "a/b")


def choosing(where: str, name: str = "first", *more: str) -> tuple[str, ...]:
    return (
        "run",
        "quickstart",
        "--dry-run",
        "--set",
        f"search.prompts_from={name}",
        f"search.prompts_where={where}",
        *more,
    )


def test_a_dry_run_tells_how_many_prompts_an_earlier_run_leaves(root: str, capsys: pytest.CaptureFixture[str]):
    out = printed(capsys, *choosing("tries > 0", "first", "search.prompts_per_round=1"))
    tried = printed(capsys, "sql", "first", "select count(*) from difficulty where tries > 0", "--csv").split()[1]
    assert f"{tried} of the {len(PROMPTS)} prompts of {root}/runs/first: where tries > 0" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (choosing("tries > 0", "nobody"), "search.prompts_from: there is no run at "),
        (choosing("tries > 0", "ftp://x/runs/y"), "search.prompts_from: a store is a path"),
        (choosing("nonsense > 0"), "search.prompts_where: 'nonsense > 0': Binder Error: Referenced column"),
        (choosing("tries >"), "search.prompts_where: 'tries >': Parser Error"),
        (choosing("true; drop view draws"), "search.prompts_where: 'true; drop view draws': Parser Error"),
        (choosing("text in (from '/etc/hostname')"), "search.prompts_where: "),
        (choosing("tries < 0"), f"search.prompts_where: 'tries < 0' holds for 0 of the {len(PROMPTS)} prompts of "),
        (choosing("tries >= 0"), "prompts of {root}/runs/first, and a round asks 64 (search.prompts_per_round)"),
    ],
)
def test_an_earlier_run_that_cannot_choose_prompts_is_refused_by_the_setting_at_fault(
    arguments: tuple[str, ...], said: str, root: str, capsys: pytest.CaptureFixture[str]
):
    assert said.format(root=root) in refused(capsys, *arguments)


def test_a_model_with_a_damaged_file_is_refused_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "added_tokens.json").write_bytes(b"[" * 100_000)
    said = refused(capsys, "run", "gsm8k", "--dry-run", "--set", f"model.path={tmp_path}")
    assert f"model.path: '{tmp_path}' holds no policy that can be trained: added_tokens.json is not readable" in said


def test_a_list_can_be_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    printed(capsys, "run", "math", "--dry-run", "--set", "task.options.levels=[3, 4]", "sync.lag=null")
    changes = ("--set", "sampling.mean_reward_between=[0.2, 0.8]")
    assert "have a mean reward between 0.2 and 0.8" in printed(capsys, "run", "quickstart", "--dry-run", *changes)
    assert "task.options.levels.0" in refused(capsys, "run", "math", "--dry-run", "--set", "task.options.levels=[7]")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("nonsense",), "nonsense"),
        (("quickstart", "--set", "training.stepz=3"), "training.stepz"),
        (("quickstart", "--set", "training.steps"), "KEY=VALUE"),
        (("quickstart", "--steps", "0"), "training.steps"),
        (("math", "--set", 'task.options={"levels": [3], "levels": [4]}'), "task.options: key 'levels' is given more"),
        (("math", "--set", f"task.options={'[' * 100_000}"), "task.options"),
        (("quickstart", "--set", "sampling.recent_share=1.5"), "sampling.recent_share"),
        (("gsm8k", "--set", "model.path="), "model.path must be set, because task 'gsm8k' makes no policy"),
    ],
    ids=lambda it: str(it)[:60],
)
def test_impossible_settings_are_refused_before_anything_starts(
    arguments: tuple[str, ...], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert named in refused(capsys, "run", *arguments, "--root", str(tmp_path))
    assert list(tmp_path.iterdir()) == []
