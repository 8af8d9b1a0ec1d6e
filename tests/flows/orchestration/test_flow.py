"""The flow `tba` on a real server with real workers. Roles are processes that only pretend to learn, except in the test
of a whole run."""

import os
import signal
import threading
import time
import urllib.error
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from playwright.sync_api import Browser

import storage
from benchmarks.harness.servers import Server
from benchmarks.harness.tiny_models import tiny_folder
from flows.cli import main
from flows.orchestration.flow import refuse_too_large, resume_run, tba
from flows.orchestration.local_server import FINAL, Stack, run_task
from flows.planning import create
from storage import layout
from storage.objects.open_store import open_store
from storage.runs.control import change_state, read_state
from storage.runs.events import read_events
from storage.runs.leases import read_lease, read_leases
from storage.runs.run import Run
from tba.errors import ConfigError
from tba.presets import preset
from tests.conftest import s3_root
from tests.support.flows.prefect_flow import OVERRIDES, ROLES, Flow
from tests.support.flows.roles import LIMITS, TINY, at_work, behave, end_roles, finish, is_running
from tests.support.storage.wandb_files import history
from tests.support.waiting import until

pytestmark = pytest.mark.slow
STEPS = 40


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for folder in tmp_path.glob("runs/*"):
        end_roles(Run.open(str(folder)))


def once_at_work(url: str) -> Run:
    until(lambda: open_store(url).exists(layout.RUN), "there is a run")
    run = Run.open(url)
    at_work(run, *ROLES)
    return run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    config = preset("quickstart").to_dict()
    return Run.create(str(tmp_path), "r", config=config, sampler_sql="select 1", code_version="test")


def test_a_deployment_that_was_asked_for_on_the_command_line_runs_to_its_end_and_reports(
    stack: Stack, root: Path, capsys: pytest.CaptureFixture[str]
):
    url = layout.run_url(str(root), "First_Run")
    threading.Thread(target=lambda: finish(once_at_work(url)), daemon=True).start()
    code = run_task(stack, "quickstart", [("run", "First_Run"), ("root", str(root)), ("overrides", OVERRIDES)])
    assert code == 0
    shown = capsys.readouterr()
    assert "trainer, life 1, finished" in shown.err
    assert "| 000001-a0001 | 4 |" in shown.out
    assert "report.html" in shown.out
    (flow,) = stack.api.flow_runs("COMPLETED")
    artifacts = {it["key"]: it for it in stack.api.call("POST", "/artifacts/latest/filter", {})}
    assert '"version": "000001-a0001"' in artifacts["versions-first-run"]["data"]
    assert "| 000001-a0001 | 4 | 0.0 MB |" in artifacts["report-first-run"]["data"]
    assert "0.75" in artifacts["report-first-run"]["data"]
    assert artifacts["progress-first-run"]["flow_run_id"] == flow["id"]
    wanted = {"task_runs": {"flow_run_id": {"any_": [flow["id"]]}}}
    tasks = {it["name"]: it["state_type"] for it in stack.api.call("POST", "/task_runs/filter", wanted)}
    assert tasks == {f"{role}, life 1": "COMPLETED" for role in ROLES}


def test_roles_outlive_a_killed_flow_are_adopted_by_the_next_and_stop_when_that_is_cancelled(stack: Stack, root: Path):
    flow = Flow(stack, root, "r")
    run = flow.run()
    leases = at_work(run, *ROLES)
    supervisor = until(lambda: read_lease(run, "supervisor"))
    os.kill(supervisor.pid, signal.SIGKILL)
    assert flow.ended()["type"] == "CRASHED"
    assert all(is_running(lease.pid) for lease in leases.values())

    resumed = Flow(stack, root, "r", resume=True)
    until(lambda: len([e for e in read_events(run) if e["kind"] == "role-adopted"]) == 3, "all are adopted")
    assert {role: lease.pid for role, lease in at_work(run, *ROLES).items()} == {r: it.pid for r, it in leases.items()}
    resumed.cancel()
    assert resumed.ended()["type"] == "CANCELLED"
    assert not any(is_running(lease.pid) for lease in leases.values())
    assert read_state(run).desired == "stop"
    assert {lease.role: lease.status for lease in read_leases(run)} == dict.fromkeys([*ROLES, "supervisor"], "stopped")


@pytest.mark.long
def test_a_retried_flow_run_finds_the_run_it_made(stack: Stack, root: Path):
    flow = Flow(stack, root, "r")
    run = flow.run()
    leases = at_work(run, *ROLES)
    os.kill(until(lambda: read_lease(run, "supervisor")).pid, signal.SIGKILL)
    assert flow.ended()["type"] == "CRASHED"
    flow.again()
    until(lambda: len([e for e in read_events(run) if e["kind"] == "role-adopted"]) == 3, "all are adopted")
    finish(run)
    assert flow.ended()["type"] == "COMPLETED"
    assert not any(is_running(lease.pid) for lease in leases.values())


def test_a_retry_stands_by_while_the_first_lives_then_takes_its_place_and_keeps_the_searchers(stack: Stack, root: Path):
    flow = Flow(stack, root, "r", searchers=1)
    run = flow.run()
    at_work(run, *ROLES)
    assert main(["scale", run.url, "--searchers", "2"]) == 0
    at_work(run, "searcher-001")
    first = until(lambda: read_lease(run, "supervisor"))
    flow.go_on()
    until(lambda: "this one stands by" in flow.log(), "the second stands by", 90)
    assert len([it for it in read_events(run) if it["kind"] == "supervisor-started"]) == 1

    os.kill(first.pid, signal.SIGKILL)
    until(lambda: len([e for e in read_events(run) if e["kind"] == "role-adopted"]) == 4, "all are adopted", 90)
    assert read_state(run).searchers == 2
    finish(run)
    until(lambda: flow.state() == "COMPLETED", "it ends well", 90)
    assert "role-draining" not in {it["kind"] for it in read_events(run) if "too many of 1" in it["message"]}


@pytest.mark.long
def test_a_retry_that_stands_by_ends_like_the_first(stack: Stack, root: Path):
    flow = Flow(stack, root, "r")
    run = flow.run()
    at_work(run, *ROLES)
    flow.go_on()
    until(lambda: "this one stands by" in flow.log(), "the second stands by", 90)
    assert main(["stop", run.url]) == 0
    until(lambda: flow.log().count("was stopped: ") >= 2, "both end", 90)
    assert flow.ended()["type"] == "CANCELLED"
    assert len([it for it in read_events(run) if it["kind"] == "supervisor-started"]) == 1


def test_a_retried_flow_run_leaves_a_run_of_the_same_name_alone(stack: Stack, root: Path):
    config = preset("quickstart").to_dict()
    run = Run.create(str(root), "r", config=config, sampler_sql="select 1", code_version="test")
    change_state(run, desired="stop", why="somebody said so")
    flow = Flow(stack, root, "r")
    assert flow.ended()["type"] == "FAILED"
    flow.again()
    until(lambda: flow.runs() == 2 and flow.state() in FINAL, "it has run again", 90)
    assert "exists already" in stack.api.state_of(flow.id)["message"]
    assert read_state(run).why == "somebody said so"
    assert not read_leases(run)


def test_deployed_roles_are_restarted_and_stop_with_their_flow(stack: Stack, root: Path):
    flow = Flow(stack, root, "r", launcher="deployments")
    run = flow.run()
    leases = at_work(run, *ROLES)
    os.kill(leases["searcher-000"].pid, signal.SIGKILL)
    at_work(run, "searcher-000", life=2)
    asked = {"filter": {"event": {"name": ["tba.role-ended"]}}}
    [told, *_] = until(
        lambda: stack.api.call("POST", "/events/filter", asked)["events"], "an automation can hear of that"
    )
    assert told["resource"]["prefect.resource.id"] == "tba.run.r" and "searcher-000" in told["payload"]["message"]
    assert told["payload"]["severity"] == "warning"
    flow.cancel()
    assert flow.ended()["type"] == "CANCELLED"
    assert not any(is_running(lease.pid) for lease in read_leases(run) if lease.role != "supervisor")
    until(lambda: not set(flow.children().values()) & {"Running", "Pending", "Cancelling", "Scheduled"})
    ended = flow.children()
    assert ended["r-searcher-000-1"] == "Failed"
    assert ended["r-searcher-000-2"] in ("Stopped", "Cancelled")


@pytest.mark.long
def test_roles_run_in_the_deployments_of_the_preset_that_was_asked_for(stack: Stack, root: Path):
    """There is no such model, so the trainer of the run cannot start."""
    changes = {"model.path": "/no/such/model", "task.options.classifier_kind": "label"}
    overrides = {**OVERRIDES, **changes}
    flow = Flow(stack, root, "r", launcher="deployments", task="redteam-laptop", overrides=overrides)
    until(lambda: len(flow.found_children()) >= len(ROLES), "all roles have been asked for", 60)
    used = {it["deployment_id"] for it in flow.found_children().values()}
    names = {stack.api.call("GET", f"/deployments/{it}")["name"] for it in used}
    assert names == {"redteam-laptop"} and len(used) == len(ROLES)
    assert flow.run().config["task"]["name"] == "redteam"
    flow.cancel()
    assert flow.ended()["type"] in FINAL


@pytest.mark.long
def test_a_retry_of_a_deployed_role_disturbs_neither_its_life_nor_its_run(stack: Stack, root: Path):
    flow = Flow(stack, root, "r", launcher="deployments")
    run = flow.run()
    leases = at_work(run, *ROLES)
    flow.go_on("r-trainer-1")
    until(lambda: flow.children()["r-trainer-1"] == "Superseded", "it has another go", 90)
    time.sleep(3 * LIMITS["limits.lease_every"])
    trainer = at_work(run, "trainer")["trainer"]
    assert (trainer.life, trainer.pid) == (1, leases["trainer"].pid)
    finish(run)
    assert flow.ended()["type"] == "COMPLETED"
    assert set(flow.children()) == {"r-trainer-1", "r-evaluator-1", "r-searcher-000-1"}


@pytest.mark.long
def test_a_deployed_searcher_stops_by_itself_once_the_trainer_has_finished(stack: Stack, root: Path):
    flow = Flow(stack, root, "r", launcher="deployments")
    run = flow.run()
    at_work(run, *ROLES)
    behave(run, "trainer", "finish")
    until(lambda: flow.children()["r-searcher-000-1"] == "Stopped", "its flow run ends", 60)
    assert flow.children()["r-evaluator-1"] == "Running"
    finish(run)
    assert flow.ended()["type"] == "COMPLETED"
    assert read_state(run).why == "finished"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_whole_run_on_s3_is_cancelled_from_prefect_and_resumed_to_its_end(
    stack: Stack, s3: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, browser: Browser
):
    root = s3_root(s3, monkeypatch)
    overrides = {"model.path": str(tiny_folder(tmp_path / "policy")), "metrics.wandb": "offline", **TINY}
    settings = {"task": "quickstart", "launcher": "deployments"}
    flow = Flow(stack, root, "whole", steps=STEPS, overrides=overrides, **settings)
    run = flow.run()
    until(lambda: (it := read_lease(run, "trainer")) and it.progress.get("step", 0) >= 8, "the trainer learns", 200)
    flow.cancel()
    assert flow.ended()["type"] == "CANCELLED"
    leases = {lease.role: lease for lease in read_leases(run)}
    assert not any(is_running(leases[role].pid) for role in ROLES)
    assert {leases[role].status for role in ROLES} == {"stopped"}
    with storage.connect(run) as con:
        ((taken,),) = con.execute("select max(step) from steps").fetchall()
    assert 8 <= taken < STEPS

    resumed = Flow(stack, root, "whole", resume=True, **settings)
    assert resumed.ended(300)["type"] == "COMPLETED", resumed.ended()
    assert main(["check", run.url]) == 0
    with storage.connect(run) as con:
        steps = con.execute("select count(*), count(distinct step), max(step) from steps").fetchall()
        ((first,),) = con.execute("select min(step) from steps where attempt = 2").fetchall()
    assert steps == [(STEPS, STEPS, STEPS)]
    assert first == taken + 1, "the trainer that was asked to stop left a checkpoint of its last step"
    sessions = sorted((stack.home / "cache" / "wandb" / "whole").glob("**/*.wandb"))
    logged = [row["trainer/step"] for session in sessions for row in history(session) if "loss/value" in row]
    assert sorted(logged) == list(range(1, STEPS + 1))
    report = {it["key"]: it for it in stack.api.call("POST", "/artifacts/latest/filter", {})}["report-whole"]
    curves = ("Scores of versions", "Reward of batches", "Loss")
    assert all(f"![{title}](data:image" in report["data"] for title in curves), report["data"]
    with closing(browser.new_page()) as shown:
        shown.add_init_script(f"localStorage.setItem('prefect-password', btoa('{stack.api.password}'))")
        shown.goto(f"{stack.api.address}/artifacts/artifact/{report['latest_id']}")
        for title in curves:
            curve = shown.get_by_alt_text(title)
            curve.wait_for()
            assert curve.evaluate("image => image.naturalWidth") > 100


def test_a_misspelt_setting_is_refused_before_there_is_a_run(root: Path):
    with pytest.raises(ConfigError, match=r"training\.stepz"):
        tba.fn(run="r", root=str(root), overrides={"training.stepz": 3})
    assert not list(root.iterdir())


def test_the_server_refuses_parameters_that_are_out_of_range(stack: Stack, root: Path):
    with pytest.raises(urllib.error.HTTPError, match=r"409|422"):
        Flow(stack, root, "r", steps=0)


def test_a_run_that_is_resumed_keeps_its_settings_and_its_task(run: Run):
    with pytest.raises(ConfigError, match=r"resume: the run keeps its settings, .* must not be given, got steps=3"):
        tba.fn(run=run.url, resume=True, steps=3)
    with pytest.raises(ConfigError, match=r"got seed=0, overrides={'sync\.every': 2}"):
        tba.fn(run=run.url, resume=True, seed=0, overrides={"sync.every": 2})
    with pytest.raises(ConfigError, match=r"task: run .* is of task 'quickstart', got 'gsm8k'"):
        tba.fn(task="gsm8k", run=run.url, resume=True)
    with pytest.raises(ConfigError, match="run: must be the name or URL of the run to resume, got nothing"):
        tba.fn(resume=True)


def test_a_run_is_resumed_by_the_name_of_its_task_or_of_a_preset_of_it(tmp_path: Path):
    config = preset("redteam-laptop").to_dict()
    run = Run.create(str(tmp_path), "r", config=config, sampler_sql="select 1", code_version="test")
    for name in ("redteam-laptop", "redteam"):
        resumed, settings = resume_run(name, run.url, str(tmp_path), None)
        assert (resumed.url, settings.task.name) == (run.url, "redteam")
    with pytest.raises(ConfigError, match=r"task: run 'r' is of task 'redteam', got 'quickstart'"):
        resume_run("quickstart", run.url, str(tmp_path), None)


def test_a_resumed_run_has_to_fit_with_the_searchers_that_it_will_have(tmp_path: Path):
    config = preset("gsm8k").replace({"engine.memory_fraction": 0.1})
    run = create.start(config, str(tmp_path), "r")
    fits = partial(refuse_too_large, "1x80", "deployments")
    resumed = partial(resume_run, "gsm8k", run.url, str(tmp_path), fits=fits)
    with pytest.raises(ConfigError, match="the run does not fit on 1x80"):
        resumed(None)
    resumed(1)
    assert read_state(run).searchers == 1
    resumed(None)
    with pytest.raises(ConfigError, match="the run does not fit on 1x80"):
        resumed(config.search.searchers)
    assert read_state(run).searchers == 1


def test_a_run_in_step_that_does_not_fit_is_told_only_of_settings_that_a_fork_of_it_can_have():
    changes = {"model.path": "Qwen/Qwen2.5-1.5B", "search.searchers": 2, "search.prompts_per_round": 16}
    with pytest.raises(ConfigError, match="a fork fits with --set ") as raised:
        refuse_too_large("1x80", "deployments", preset("math").replace(changes))
    assert "search.searchers" not in str(raised.value)
