"""Whole roles on real storage: a trainer, a searcher and an evaluator side by side, with a tiny random policy."""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.harness.tiny_models import tiny_folder
from flows.planning import create
from flows.roles import wiring
from flows.roles.buffer_process import make_buffer
from storage import layout
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
from tba.errors import DeadlinePassed, Stopped, Superseded
from tba.models.policy import Policy
from tba.train.schedules import beta_at, learning_rate_at
from tba.types import Version
from tests.support.flows.live_roles import EVERY, STEPS, broken_off, learned, live, rows, run_all, settings
from tests.support.flows.prompt_examples import store_prompts
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
