"""Whole roles on real storage: a trainer, a searcher and an evaluator side by side, with a tiny random policy."""

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import fakes
from benchmarks.harness.tiny_models import tiny_folder, tiny_policy
from flows.planning import create, resolve
from flows.roles import prompt_intake, wiring
from flows.roles.buffer_process import make_buffer
from storage import layout
from storage.local_files.shared_cache import cache_folder
from storage.log.prompts import read_prompts
from storage.maintenance.check import check
from storage.objects.s3.store import S3Store
from storage.runs.attempts import newest_attempt
from storage.runs.control import change_state
from storage.runs.events import Events
from storage.runs.held_lease import HeldLease
from storage.runs.run import Run
from storage.weights.attempt_claim import claim_attempt
from storage.weights.checkpoints import Checkpoints
from storage.weights.evaluations import Evaluations
from storage.weights.versions import Versions
from tba.config import Config, parse
from tba.errors import ConfigError, DataError, DeadlinePassed, Stopped, Superseded
from tba.models.policy import Policy
from tba.tasks.registry import get_task
from tba.train.schedules import beta_at, learning_rate_at
from tba.types import Prompt, Version
from tests.support.flows.live_roles import (
    EVERY,
    SMALL,
    STEPS,
    broken_off,
    learned,
    live,
    rows,
    run_all,
    settings,
    upload,
)
from tests.support.models.families import FAMILIES, family_folder
from tests.support.original_data import original_data
from tests.support.sampled_parameters import sampled


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("policy") / "tiny")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, policy: Path) -> Iterator[Run]:
    run = create.start(settings(policy), str(tmp_path_factory.mktemp("root")), "whole")
    run_all(run)
    yield run


def test_a_run_ends_with_every_step_in_the_ledger_and_nothing_missing_or_doubled(finished):
    assert rows(finished, "select step, sync from steps order by step") == [
        (step, (step + 1) // EVERY) for step in range(1, STEPS + 1)
    ]
    assert rows(finished, "select count(*), count(distinct (step, slot, position)) from draws") == [
        (STEPS * 4 * 8, STEPS * 4 * 8)
    ]
    assert check(finished).ok


def test_every_draw_joins_to_its_step_and_to_a_trajectory_of_its_age(finished):
    joined = rows(
        finished,
        "select count(*) from draws d join trajectories t using (trajectory_id) join steps s on s.step = d.step "
        "where t.step < d.step and d.age = d.step - 1 - t.version_start * 2",
    )
    assert joined == [(STEPS * 4 * 8,)]


def test_the_loss_of_a_step_is_the_mean_of_its_squared_residuals(finished):
    pairs = rows(
        finished, "select any_value(loss), avg(residual ** 2) from draws join steps using (step) group by step"
    )
    assert len(pairs) == STEPS
    for loss, mean in pairs:
        assert loss == pytest.approx(mean, rel=1e-5)


def test_responses_in_flight_go_on_with_a_newer_version_if_that_is_wanted(tmp_path, policy, monkeypatch):
    monkeypatch.setattr("tba.search.version_adoption.LOOK_EVERY", 0.0)
    changes = {"engine.in_flight": "update", "search.max_response_tokens": 200}
    run = create.start(settings(policy, **changes), str(tmp_path), "update")
    run_all(run)
    assert check(run).ok
    found = "select count(*) filter (version_start < version_end), count(*) filter (version_start > version_end) "
    [(across, backwards)] = rows(run, f"{found} from trajectories")
    assert across > 0 and backwards == 0
    groups = (
        "select count(*) from (select group_id from trajectories group by 1 having count(distinct version_end) > 1)"
    )
    assert rows(run, groups)[0][0] > 0, "those that had ended before are the earlier version's"


def test_a_residual_follows_from_the_stored_reward_and_log_probabilities(finished):
    """The residual is log Z + log pi - log pi_ref - r / beta, computed from stored columns alone."""
    worst = rows(
        finished,
        "select max(abs(residual - (d.log_z + logp - ref_logp - reward / beta))) "
        "from draws d join trajectories using (trajectory_id) join steps s on s.step = d.step",
    )
    assert worst[0][0] < 1e-3


def test_the_stored_reference_log_probabilities_are_the_ones_that_were_used(finished):
    worst = rows(
        finished,
        "select max(abs(ref_logp - list_sum(ref_logps[:length - finished::int]))) "
        "from draws join trajectories using (trajectory_id)",
    )
    assert worst[0][0] < 1e-3


def test_on_the_first_version_the_policy_is_the_reference(finished):
    """At step 1 nothing has been learned: log pi = log pi_ref = what the generator recorded."""
    worst = rows(
        finished,
        "select max(abs(logp - ref_logp)), max(abs(ref_logp - list_sum(behaviour_logps[:length - finished::int]))) "
        "from draws d join trajectories using (trajectory_id) where d.step = 1",
    )
    assert max(worst[0]) < 1e-3


def test_every_step_followed_the_schedules_of_beta_and_of_the_learning_rate(finished):
    config = parse(finished.config)
    assert rows(finished, "select step, beta, lr from steps order by step") == [
        (step, beta_at(step, config.objective), learning_rate_at(step, config.training)) for step in range(1, STEPS + 1)
    ]


def test_a_version_is_compared_with_the_one_published_before_it(finished):
    first, *later = rows(finished, "select version, changed_share from versions where state = 'kept' order by version")
    assert first == (0, None)
    assert later and all(0 < share <= 1 for _, share in later)


def test_the_first_and_the_last_version_are_scored(finished):
    scored = {version.number for version in Evaluations(finished).done()}
    assert {0, STEPS // EVERY} <= scored


def test_each_version_has_every_score_and_how_it_was_sampled(finished):
    """A reward of 0 counts as right here, so pass@k is 1 whatever the mean reward."""
    found = rows(finished, "select distinct metric, n, temperature, top_p from evaluations order by metric")
    sampled = (0.35, 0.9)
    assert found == [
        ("greedy", 8, 0.0, 1.0),
        ("pass@1", 8, *sampled),
        ("pass@2", 8, *sampled),
        ("sampled", 16, *sampled),
    ]
    assert rows(finished, "select distinct value from evaluations where metric like 'pass@%'") == [(1.0,)]


def test_each_scored_version_has_examples_of_its_greedy_responses(finished):
    """There are fewer prompts than `evaluation.examples`, so the mean reward of the examples is the score."""
    kept = "select version, count(*), round(avg(reward), 9) from examples group by version order by version"
    scored = "select version, n, round(value, 9) from evaluations where metric = 'greedy' order by version"
    assert rows(finished, kept) == rows(finished, scored)
    texts = "select prompt_id, prompt, answer from examples where version = 0 order by prompt_id"
    prompts = "select prompt_id, text, answer from prompts where split = 'test' order by prompt_id limit 8"
    assert rows(finished, texts) == rows(finished, prompts)
    assert [it.response for it in Evaluations(finished).examples() if it.version.number == 0] != [""] * 8


@pytest.mark.long
@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_on_the_trainers_machine_no_version_of_a_remote_run_is_fetched(root, policy, tmp_path, monkeypatch):
    """On another machine the fetched versions are the same, although some are stored as differences."""
    fetched: list[str] = []
    download = S3Store.download

    def counted(store: S3Store, key: str, path: Path) -> None:
        fetched.append(key)
        download(store, key, path)

    monkeypatch.setattr(S3Store, "download", counted)
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "of the trainer"))
    changes = {"model.publish_dtype": "bfloat16", "training.learning_rate": 1e-6, "sync.whole_every": 3}
    steps = {"training.steps": 3 * EVERY}  # no more versions than the cache keeps
    run = create.start(settings(policy, **changes, **steps), root, "whole")
    run_all(run)
    assert {0, 3} <= {version.number for version in Evaluations(run).done()}
    assert [key for key in fetched if key.startswith(layout.VERSIONS)] == []
    assert check(run).ok
    versions, published = Versions(run), Versions(run).complete()
    assert [base and base.number for base in map(versions.base, published)] == [None, 0, 0, None]
    here = [versions.load(version) for version in published]
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "of a searcher"))
    for folder, version in zip(here, published, strict=True):
        weights = versions.load(version) / "model.safetensors"
        assert weights.read_bytes() == (folder / "model.safetensors").read_bytes()


def test_a_later_searcher_generates_with_a_later_version(finished):
    assert rows(finished, "select max(version_start) > 0 from trajectories") == [(True,)]


@pytest.mark.parametrize(("checkpoint", "records"), sampled([(2, 4), (4, 6), (0, 3)], kept=[(2, 4)]))
def test_a_resumed_trainer_takes_the_same_steps_on_the_same_trajectories(finished, tmp_path, checkpoint, records):
    """Draws, losses, gradient norms and the weights after every sync are the same, bit for bit, up to the last stored
    record."""
    run = broken_off(finished, tmp_path, after_checkpoint=checkpoint, keep_records=records)
    assert live(run, "trainer", wiring.run_trainer) == []
    whole, again = learned(finished), learned(run)
    replayed = min((records + 1) * EVERY, STEPS)
    assert [row[0] for row in again] == list(range(1, STEPS + 1))
    assert again[:replayed] == whole[:replayed]
    assert check(run).ok


def test_a_trainer_that_is_asked_to_stop_leaves_a_checkpoint_and_no_lost_step(finished, tmp_path):
    run = broken_off(finished, tmp_path, after_checkpoint=0, keep_records=6)
    change_state(run, desired="stop", why="enough")
    ended = live(run, "trainer", wiring.run_trainer)
    assert [type(error) for error in ended] == [Stopped]
    newest = Checkpoints(run).newest()
    taken = rows(run, "select max(step) from steps")[0][0]
    assert newest is not None and taken == newest.number * EVERY < STEPS


def test_a_superseded_trainer_stops_without_writing_a_record(finished, tmp_path):
    run = broken_off(finished, tmp_path, after_checkpoint=2, keep_records=2)
    original = claim_attempt(run)
    buffer = make_buffer(run, Config(), original.number, Events(run, "trainer", 9))
    for sync in range(3):
        buffer.sync(sync, step=sync * EVERY)
    claim_attempt(run)
    with pytest.raises(Superseded):
        buffer.sync(3, step=3 * EVERY)
    assert not run.store.exists(layout.sync(3))


def test_a_trainer_superseded_before_it_claims_an_attempt_leaves_the_newer_attempt_alone(policy, tmp_path):
    run = create.start(settings(policy), str(tmp_path), "twice")
    with HeldLease(run, "trainer", every=0.05) as earlier, HeldLease(run, "trainer", every=60):
        newer = claim_attempt(run)
        with pytest.raises(Superseded):
            while True:
                earlier.check()
                time.sleep(0.01)
        with pytest.raises(Superseded):
            wiring.run_trainer(run, earlier, Events(run, "trainer", earlier.life))
        assert newest_attempt(run) == newer.number


def test_without_searchers_the_initial_fill_has_a_deadline(policy, tmp_path):
    config = settings(policy, **{"limits.data_deadline": 1.0})
    run = create.start(config, str(tmp_path), "lonely")
    (error,) = live(run, "trainer", wiring.run_trainer)
    assert isinstance(error, DeadlinePassed) and "0 of 64 trajectories" in str(error)
    assert run.store.exists(layout.version(Version(0, 1)) + layout.MANIFEST)


def ended_at_once(config: Config, root: object) -> BaseException:
    (error,) = live(create.start(config, str(root), "refused"), "trainer", wiring.run_trainer)
    return error


def test_a_limit_that_leaves_no_prompt_ends_the_run_before_anything_is_searched(policy, tmp_path):
    error = ended_at_once(settings(policy, **{"search.max_prompt_tokens": 2}), tmp_path)
    assert isinstance(error, DataError)
    assert str(error) == (
        "task 'quickstart' makes no prompt of split 'train' with at most 2 tokens (search.max_prompt_tokens)"
    )


def test_more_tokens_than_the_policy_can_read_are_refused_before_anything_starts_and_by_the_trainer(policy, tmp_path):
    refusal = "must be <= 1024, the length that the policy can read, got 1036"
    changes = {**SMALL, "model.path": str(policy), "search.max_response_tokens": 1020}
    with pytest.raises(ConfigError, match=refusal):
        resolve.resolve("quickstart", changes)
    error = ended_at_once(resolve.resolve("quickstart", changes, runs_here=False), tmp_path)
    assert isinstance(error, ConfigError) and refusal in str(error)


# --- Which prompts are asked ---


def store_prompts(run: Run, tokenizer: object) -> None:
    config = parse(run.config)
    prompt_intake.store_prompts(run, config, get_task(config.task), tokenizer, Events(run, "trainer", 1))


def test_the_prompts_are_those_that_an_earlier_run_chooses_and_stay_so_when_it_is_gone(finished, policy, tmp_path):
    """Evaluation keeps its own prompts. A trainer that starts again does not need the earlier run."""
    earlier = Run.open(str(shutil.copytree(finished.url, tmp_path / "earlier")))
    where = "tries between 1 and 8"
    config = settings(policy, **{"search.prompts_from": earlier.url, "search.prompts_where": where})
    run = create.start(config, str(tmp_path), "chosen")
    tokenizer = Policy.load(policy, device="cpu").tokenizer
    store_prompts(run, tokenizer)
    wanted = {id for (id,) in rows(earlier, f"select prompt_id from difficulty where {where}")}
    chosen, all_of_them = read_prompts(run, "train"), read_prompts(earlier, "train")
    assert chosen == [prompt for prompt in all_of_them if prompt.prompt_id in wanted]
    assert 0 < len(chosen) < len(all_of_them)
    assert read_prompts(run, "test") == read_prompts(earlier, "test")
    told = (
        "select message, data ->> 'chosen', data ->> 'of', data ->> 'unknown' from events where kind = 'prompts-chosen'"
    )
    [(message, *counts)] = rows(run, told)
    assert counts == [str(len(chosen)), str(len(all_of_them)), "0"]
    assert message.endswith(f"prompts: {len(chosen):,} of {len(all_of_them):,} here")
    shutil.rmtree(earlier.url)
    store_prompts(run, tokenizer)
    assert read_prompts(run, "train") == chosen
    assert len(rows(run, told)) == 1


class Careless(fakes.Task):
    """A task that makes three prompts of one row, and adds the prompts that it is given."""

    def __init__(self, data: Path, *others: Prompt):
        self.data, self.others = data, others

    def source(self, split: str) -> str:
        return str(self.data)

    def prompts(
        self, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int
    ) -> list[Prompt]:
        return [*super().prompts(split, rows, tokenizer, max_tokens=max_tokens), *self.others]


def store_careless(policy: Path, folder: Path, *others: Prompt) -> Run:
    run = create.start(settings(policy), str(folder), "careless")
    task = Careless(word_problems(folder, "train", 0), *others)
    prompt_intake.store_prompts(run, parse(run.config), task, None, Events(run, "trainer", 1))
    return run


@pytest.mark.parametrize("tokens", [0, 17])
def test_a_prompt_that_no_policy_can_read_is_refused_before_anything_is_searched(policy, tmp_path, tokens):
    says = rf"task 'fake': prompt 'odd' must have 1 to 16 tokens \(search.max_prompt_tokens\), got {tokens}"
    with pytest.raises(DataError, match=says):
        store_careless(policy, tmp_path, Prompt(prompt_id="odd", text="", tokens=(2,) * tokens))


@pytest.mark.parametrize(
    ("odd", "says"),
    [
        ({"answer": 7}, "prompt 'odd': answer must be text, got 7"),
        ({"text": None}, "prompt 'odd': text must be text, got None"),
        ({"prompt_id": 3}, "prompt 3: prompt_id must be text, got 3"),
        ({"tokens": ([2, 3],)}, "prompt 'odd': tokens must be whole numbers, got [2, 3]"),
        ({"metadata": {"seen": {1}}}, "prompt 'odd': metadata must be JSON: Object of type set"),
        ({"metadata": {"share": float("nan")}}, "prompt 'odd': metadata must be JSON: Out of range float"),
        (None, "a prompt must be a tba.types.Prompt, got None"),
    ],
)
def test_a_prompt_that_cannot_be_stored_is_refused_by_its_field(policy, tmp_path, odd, says):
    prompt: Any = odd and Prompt(**{"prompt_id": "odd", "text": "", "tokens": (2,), **odd})
    with pytest.raises(DataError) as refused:
        store_careless(policy, tmp_path, prompt)
    assert str(refused.value).startswith(f"task 'fake': {says}")


def test_an_id_that_is_in_both_splits_is_refused(policy, tmp_path):
    says = "task 'fake': prompt_id 'odd' is in both splits, train and test"
    with pytest.raises(DataError, match=says):
        store_careless(policy, tmp_path, Prompt(prompt_id="odd", text="", tokens=(2,)))


def test_what_the_tasks_own_code_raises_names_the_method(policy, tmp_path):
    def fail(split: str) -> str:
        raise KeyError(split)

    run = create.start(settings(policy), str(tmp_path), "careless")
    for method, what in (("source", "KeyError: 'train'"), ("prompts", "TypeError: .*got an unexpected keyword")):
        task: Any = fakes.Task()
        setattr(task, method, fail)
        with pytest.raises(DataError, match=f"task 'fake': {method} raised {what}"):
            prompt_intake.store_prompts(run, parse(run.config), task, None, Events(run, "trainer", 1))


def test_a_row_may_make_several_prompts_and_nothing_is_said_to_be_left_out(policy, tmp_path):
    run = store_careless(policy, tmp_path)
    assert len(read_prompts(run, "train")) == 3
    assert rows(run, "select count(*) from events where kind = 'prompts-left-out'") == [(0,)]


def test_prompts_that_the_earlier_run_asked_in_other_words_are_not_taken_for_the_same(policy, tmp_path):
    train, test = (word_problems(tmp_path, split, 20) for split in ("train", "test"))
    earlier = create.start(gsm8k(policy, train, test), str(tmp_path), "earlier")
    tokenizer = Policy.load(policy, device="cpu").tokenizer
    store_prompts(earlier, tokenizer)
    choosing = {"search.prompts_from": earlier.url, "search.prompts_where": "tries = 0"}
    mended = [json.loads(line) for line in train.read_text().splitlines()]
    mended[3]["question"] = "Who has more?"
    train.write_text("\n".join(map(json.dumps, [*mended, {"question": "How many?", "answer": "So.\n#### 1"}])))
    run = create.start(gsm8k(policy, train, test).replace(choosing), str(tmp_path), "mended")
    store_prompts(run, tokenizer)
    assert [prompt.prompt_id for prompt in read_prompts(run, "train")] == [
        f"train-{n:05d}" for n in range(20) if n != 3
    ]
    said = f"19 of 21 here; 2 are left out that {earlier.url} does not have, by id and text"
    [(message,)] = rows(run, "select message from events where kind = 'prompts-chosen'")
    assert message.endswith(said)
    other = gsm8k(policy, train, test).replace({**choosing, "task.template": "tba"})
    with pytest.raises(
        ConfigError, match=r"0 of 21 here; 21 are left out .*; a round asks 8 \(search.prompts_per_round"
    ):
        store_prompts(create.start(other, str(tmp_path), "other"), tokenizer)


# --- Where the policy comes from ---


@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_a_policy_on_s3_is_fetched_without_its_pickles_once_per_run(root, policy, tmp_path):
    upload(policy, f"{root}/model")
    (tmp_path / "pytorch_model.bin").write_bytes(b"a pickle")
    upload(tmp_path, f"{root}/model")
    config = settings(Path("x"), **{"model.path": f"{root}/model/", "limits.data_deadline": 0.5})
    run = create.start(config, root, "on-s3")
    (error,) = live(run, "trainer", wiring.run_trainer)
    assert isinstance(error, DeadlinePassed)  # nobody searches
    published = Policy.load(Versions(run).load(Version(0, 1)), device="cpu")
    assert published.snapshot().sha256 == Policy.load(policy, device="cpu").snapshot().sha256
    (copy,) = cache_folder("models").glob("[!.]*")
    assert not list(copy.glob("*.bin"))
    for name in ("config.json", "model.safetensors"):
        assert (copy / name).read_bytes() == (policy / name).read_bytes()


@pytest.mark.parametrize("root", ["moto"], indirect=True)
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("model.safetensors.index.json", b"[" * 100_000, "no readable model.safetensors.index.json there"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 3}}', "no readable model.safetensors.index.json there"),
        ("added_tokens.json", b"{", "added_tokens.json is not JSON"),
    ],
    ids=["deep", "wrong type", "cut off"],
)
def test_a_url_with_a_damaged_file_is_refused_by_its_name(root, policy, tmp_path, name, content, said):
    upload(policy, f"{root}/model")
    (tmp_path / name).write_bytes(content)
    upload(tmp_path, f"{root}/model", name)
    error = ended_at_once(settings(Path("x"), **{"model.path": f"{root}/model"}), root)
    assert isinstance(error, ConfigError)
    assert str(error).startswith("model.path: ") and said in str(error)


@pytest.mark.parametrize("root", ["moto"], indirect=True)
@pytest.mark.parametrize(
    ("names", "missing"),
    [
        (("model.safetensors",), "config.json"),
        (("config.json", "tokenizer.json"), "*.safetensors"),
        (("none",), "config"),
    ],
)
def test_a_url_without_a_policy_is_refused_by_what_it_lacks(root, policy, names, missing):
    upload(policy, f"{root}/model", *names)
    error = ended_at_once(settings(Path("x"), **{"model.path": f"{root}/model"}), root)
    assert isinstance(error, ConfigError)
    assert f"model.path: {root}/model is not a Hugging Face folder with safetensors: no {missing}" in str(error)


@pytest.mark.parametrize("root", ["local"], indirect=True)
def test_a_policy_in_parts_is_refused_unless_every_part_is_there(root, policy, tmp_path):
    parts = tmp_path / "parts"
    Policy.load(policy, device="cpu").snapshot().model.save_pretrained(parts, max_shard_size="20KB")
    first, *_ = sorted(parts.glob("*.safetensors"))
    first.unlink()
    error = ended_at_once(settings(Path("x"), **{"model.path": f"file://{parts}"}), root)
    assert isinstance(error, ConfigError) and f"no {first.name} there" in str(error)


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("ftp://somewhere/model", "a store is a path, file://… or s3://…, got ftp://…"),
        (
            "/no/such/folder",
            "model.path must be an existing folder, a GGUF file or a name on the hub, got '/no/such/folder'",
        ),
    ],
)
def test_a_path_that_leads_nowhere_is_refused(path, says, tmp_path):
    """The trainer refuses it too: a folder may exist where a run is started, but not where its roles run."""
    config = resolve.resolve("quickstart", {"model.path": path, **SMALL}, runs_here=False)
    error = ended_at_once(config, tmp_path)
    assert isinstance(error, ConfigError) and str(error) == says


def test_a_folder_that_can_be_no_policy_is_refused_before_anything_starts_and_by_the_trainer(policy, tmp_path):
    for name in ("config.json", "model.safetensors"):
        shutil.copy(policy / name, tmp_path)
    with pytest.raises(ConfigError, match=rf"^model\.path: '{tmp_path}' holds no policy .*: no tokenizer$"):
        settings(tmp_path)
    elsewhere = resolve.resolve("quickstart", {"model.path": str(tmp_path), **SMALL}, runs_here=False)
    error = ended_at_once(elsewhere, tmp_path / "root")
    assert isinstance(error, ConfigError) and str(error).startswith("model.path: cannot load a model from")


def test_a_policy_that_no_run_can_train_is_refused_by_the_trainer(tmp_path):
    policy = tiny_policy()
    policy.tokenizer.add_tokens(["<think>"])
    policy.snapshot().save(tmp_path / "policy")
    error = ended_at_once(settings(tmp_path / "policy"), tmp_path / "root")
    assert isinstance(error, ConfigError) and "token '<think>' of number 78, but its embedding has only" in str(error)


@pytest.mark.parametrize(("family", "told"), [("gpt-oss", ["its attention needs s_aux"]), ("gemma3", [])])
def test_a_trainer_that_pads_says_so_and_why(tmp_path, family, told):
    folder = family_folder(tmp_path / "policy", FAMILIES[family])
    run = create.start(settings(folder, **{"limits.data_deadline": 0.5}), str(tmp_path / "root"), "padded")
    (error,) = live(run, "trainer", wiring.run_trainer)
    assert isinstance(error, DeadlinePassed)  # nobody searches
    found = rows(run, "select message, data ->> 'why' from events where kind = 'trainer-pads'")
    assert [why for _, why in found] == told
    assert all(why in message for message, why in found)


# --- GSM8K ---


def word_problems(folder: Path, split: str, n: int) -> Path:
    """Write rows like those of the original data, one of them far too long."""
    rows = [
        {"question": f"Ann has {i} pens and buys {split} {i + 1} more. How many?", "answer": f"So.\n#### {2 * i + 1}"}
        for i in range(n)
    ]
    rows.append({"question": "And then? " * 200, "answer": "No end.\n#### 0"})
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder / f"{split}.jsonl"


def gsm8k(policy: Path, train: Path, test: Path) -> Config:
    changes = {
        "task.train": str(train),
        "task.test": str(test),
        "task.rule": "strict-hashes",
        "task.template": "vineppo",
        "model.publish_dtype": "float32",
        "search.searchers": 1,
        "search.max_response_tokens": 8,
        "training.responses_per_prompt": 8,
        "search.responses_per_prompt": 8,
        "training.steps": 4,
    }
    small = {key: value for key, value in SMALL.items() if key not in changes and "beta" not in key}
    return resolve.resolve("gsm8k", {"model.path": str(policy), **small, **changes})


def test_gsm8k_runs_with_a_rule_and_a_template_of_choice(policy, tmp_path):
    train, test = (word_problems(tmp_path, split, 20) for split in ("train", "test"))
    run = create.start(gsm8k(policy, train, test), str(tmp_path), "gsm8k")
    run_all(run)
    assert check(run).ok
    assert rows(run, "select split, count(*) from prompts group by 1 order by 1") == [("test", 20), ("train", 20)]
    assert rows(run, "select bool_and(prompt like '[MATH_TASK] Problem:%Solution:') from trajectories") == [(True,)]
    reasons = "they have more than 512 tokens (search.max_prompt_tokens), or the task has a reason of its own"
    assert rows(run, "select message from events where kind = 'prompts-left-out' order by 1") == [
        (f"1 of 21 rows of split '{split}' made no prompt: {reasons}",) for split in ("test", "train")
    ]


def test_gsm8k_takes_the_original_data_whole(policy, tmp_path):
    folder = original_data("gsm8k")
    run = create.start(gsm8k(policy, folder / "train.jsonl", folder / "test.jsonl"), str(tmp_path), "original")
    config = parse(run.config)
    prompt_intake.store_prompts(
        run, config, get_task(config.task), Policy.load(policy, device="cpu").tokenizer, Events(run, "trainer", 1)
    )
    assert [len(read_prompts(run, split)) > 1000 for split in ("train", "test")] == [True, True]
