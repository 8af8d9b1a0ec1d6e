import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import yaml

from flows.orchestration.flow import tba
from flows.orchestration.local_server import POOLS, Stack, command_line, prefect_file
from flows.orchestration.workdir import leave_temporary_folder
from tba.errors import ConfigError
from tba.presets import PRESETS


def test_the_server_offers_every_deployment_with_nothing_that_ties_it_to_a_machine(stack: Stack):
    found = stack.api.call("POST", "/deployments/filter", {})
    flows = {flow["id"]: flow["name"] for flow in stack.api.call("POST", "/flows/filter", {})}
    names = {f"{flows[it['flow_id']]}/{it['name']}" for it in found}
    by_task = {
        f"{flow}/{task}" for flow in ("tba", "searcher", "trainer", "trainer-node", "evaluate") for task in PRESETS
    }
    assert names == {*by_task, "compact/compact", "retention/nightly"}
    pools = {flows[it["flow_id"]]: it["work_pool_name"] for it in found}
    assert pools == {
        "tba": "tba", "searcher": "gpu-search", "trainer": "gpu-train", "trainer-node": "gpu-train",
        "evaluate": "gpu-search", "compact": "tba", "retention": "tba",
    }  # fmt: skip
    for deployment in found:
        assert deployment["entrypoint"].startswith("flows.")
        assert "/" not in str(deployment["pull_steps"])
        assert deployment["job_variables"] == {"env": {"PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "30"}}


def test_the_tba_deployments_differ_in_their_task_alone():
    deployments = yaml.safe_load(prefect_file().read_text())["deployments"]
    tasks = {it["name"]: it["parameters"] for it in deployments if it["entrypoint"] == "flows.orchestration.flow.tba"}
    assert tasks == {task: {"task": task} for task in PRESETS}


def test_a_command_finds_the_server(stack: Stack):
    command = [sys.executable, "-m", "prefect", "work-pool", "ls"]
    told = subprocess.run(command, env={**stack.environment, "COLUMNS": "200"}, capture_output=True, text=True)
    assert told.returncode == 0 and all(pool in told.stdout for pool in POOLS), told.stderr


def test_nobody_else_on_this_machine_and_no_page_in_a_browser_starts_a_deployment(stack: Stack):
    """Whoever can start a deployment can run code as the worker."""
    deployment = stack.api.call("GET", "/deployments/name/tba/quickstart")["id"]
    before = len(stack.api.flow_runs())
    url = f"{stack.api.url}/deployments/{deployment}/create_flow_run"
    for given in ({}, {"Authorization": "Basic dGJhOng="}, {"Origin": "https://example.org"}):
        asked = urllib.request.Request(url, b"{}", {"Content-Type": "application/json", **given}, method="POST")
        with pytest.raises(urllib.error.HTTPError, match="401") as refused:
            urllib.request.urlopen(asked)
        refused.value.close()
    assert len(stack.api.flow_runs()) == before
    for origin, allowed in ((stack.api.address, stack.api.address), ("https://example.org", None)):
        given = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        try:
            answer = urllib.request.urlopen(urllib.request.Request(url, headers=given, method="OPTIONS"))
        except urllib.error.HTTPError as refused:
            answer = refused
        with answer:
            assert answer.headers["Access-Control-Allow-Origin"] == allowed


def test_an_interrupt_while_runs_are_cancelled_leaves_no_server_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def cancel_runs():
        raise KeyboardInterrupt

    stack = Stack(tmp_path, pools=())
    monkeypatch.setattr(stack, "cancel_runs", cancel_runs)
    stack.processes["server"] = server = subprocess.Popen(["sleep", "600"])
    with pytest.raises(KeyboardInterrupt):
        stack.stop()
    assert server.poll() is not None


def test_nothing_of_the_users_own_prefect_is_seen(stack: Stack, monkeypatch):
    monkeypatch.setenv("PREFECT_API_KEY", "secret")
    assert "PREFECT_API_KEY" not in stack.environment
    assert stack.environment["DO_NOT_TRACK"] == "1"
    assert stack.environment["PREFECT_SERVER_ANALYTICS_ENABLED"] == "false"


def test_parameters_are_json_where_they_can_be_and_text_otherwise(capsys: pytest.CaptureFixture[str]):
    given = ["gsm8k", "steps=3", "root=s3://bucket/x", 'overrides={"training.learning_rate": 1e-5}']
    options = command_line().parse_args(given)
    assert options.task == "gsm8k"
    assert dict(options.parameters) == {
        "steps": 3,
        "root": "s3://bucket/x",
        "overrides": {"training.learning_rate": 1e-5},
    }
    with pytest.raises(SystemExit):
        command_line().parse_args(["gsm8k", "steps"])
    assert "KEY=VALUE" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command_line().parse_args(["gsm8k", 'overrides={"seed": 1, "seed": 2}'])
    assert "overrides: key 'seed' is given more than once" in capsys.readouterr().err


def test_a_run_leaves_the_temporary_folder_of_its_worker_and_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("TBA_HOME", str(tmp_path))
    with TemporaryDirectory(suffix="prefect") as folder:
        monkeypatch.chdir(folder)
        assert leave_temporary_folder() == {"directory": str(tmp_path)}
        (tmp_path / "chosen").mkdir()
        monkeypatch.chdir(tmp_path / "chosen")
        assert leave_temporary_folder() == {"directory": str(tmp_path / "chosen")}


def test_a_run_is_not_stored_in_the_temporary_folder_of_a_worker_without_a_home(monkeypatch: pytest.MonkeyPatch):
    for name in ("TBA_HOME", "PWD", "TBA_ROOT"):
        monkeypatch.delenv(name, raising=False)
    with TemporaryDirectory(suffix="prefect") as folder:
        monkeypatch.chdir(folder)
        assert leave_temporary_folder() == {"directory": folder}
        with pytest.raises(ConfigError, match=r"root: 'tba-runs' would be inside .* or set TBA_HOME"):
            tba.fn(run="r")
        assert not list(Path(folder).iterdir())
        monkeypatch.setenv("TBA_HOME", "/no/such/folder")
        with pytest.raises(ConfigError, match="TBA_HOME: '/no/such/folder' is not a folder"):
            leave_temporary_folder()
        monkeypatch.chdir("/")
