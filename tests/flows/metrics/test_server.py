"""`tba metrics`: what a scraper gets, and who may scrape."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse
from starlette.testclient import TestClient

from flows.cli import main
from flows.http_server import listen
from flows.metrics.catalogue import METRICS, Metric
from flows.metrics.exposition import encode
from flows.metrics.otlp import encode as encode_otlp
from flows.metrics.server import local_names, make_app
from flows.metrics.watched import Sample, Watched
from storage.runs.run import Run
from tests.support.flows.command_line import printed, refused

FOLDER = Path(__file__).parents[3] / "docs/monitoring"
local = pytest.mark.parametrize("root", ["local"], indirect=True)


def scraped(*runs: Run, root: str | None = None) -> list[Sample]:
    return Watched([*([root] if root else []), *(run.url for run in runs)]).scrape(deadline=60)


def expressions() -> list[str]:
    """Return all queries of the board and of the rules."""
    board, rules = (
        json.loads((FOLDER / "grafana.json").read_text()),
        yaml.safe_load((FOLDER / "alerts.yml").read_text()),
    )
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    queries += [it["query"]["query"] for it in board["templating"]["list"] if it["type"] == "query"]
    return queries + [rule["expr"] for group in rules["groups"] for rule in group["rules"]]


@local
def test_the_board_and_the_rules_ask_only_for_what_is_exported(root: str, stored: Run, live: Run):
    exported: dict[str, set[str]] = {}
    for metric, labels, _ in scraped(stored, root=root):
        exported.setdefault(metric.name, set()).update(labels)
    asked = {name for query in expressions() for name in re.findall(r"\btba_\w+", query)}
    assert asked - exported.keys() == set()
    assert len(asked) > 30
    for query in expressions():
        for name, selector in re.findall(r"\b(tba_\w+)\{([^}]*)\}", query):
            assert set(re.findall(r"(\w+)[=!]~?[=\"]", selector)) <= exported[name], query


@local
def test_every_metric_of_the_catalogue_is_exported(root: str, stored: Run, live: Run):
    rare = {"tba_role_free_disk_bytes"} if sys.platform != "linux" else set()
    assert METRICS.keys() - {metric.name for metric, _, _ in scraped(stored, root=root)} <= rare


@pytest.mark.parametrize("metric", METRICS.values(), ids=list(METRICS))
def test_names_follow_the_conventions(metric: Metric):
    assert re.fullmatch(r"tba_[a-z_]+", metric.name)
    assert metric.meaning[-1] != "."
    for unit in ("seconds", "bytes"):
        assert f"_{unit}_" not in metric.name.replace("_total", "").replace("step_seconds", "") + "|"


@local
def test_both_formats_are_what_their_parsers_read(live: Run):
    samples = scraped(live)
    expected = {(metric.name, *sorted(labels.items())): value for metric, labels, value in samples}
    plain, kind = encode(samples)
    assert kind.startswith("text/plain")
    opened, other = encode(samples, "application/openmetrics-text; version=1.0.0")
    assert other.startswith("application/openmetrics-text")
    for families in (parse(plain.decode()), openmetrics.text_string_to_metric_families(opened.decode())):
        found = {(it.name, *sorted(it.labels.items())): it.value for family in families for it in family.samples}
        assert found == expected


@local
def test_names_with_any_letters_are_escaped(live: Run):
    strange = 'a"b\\c\nd'
    [sample] = [it for it in scraped(live) if it[0].name == "tba_run_step"]
    text, _ = encode([(sample[0], {"root": strange, "run": "live"}, 1.0)])
    [family] = parse(text.decode())
    assert family.samples[0].labels["root"] == strange


@local
def test_a_collector_gets_the_same(live: Run):
    samples = scraped(live)
    data = encode_otlp(samples, began=1, now=2)
    [scope] = data.resource_metrics[0].scope_metrics
    points = [(metric.name, point) for metric in scope.metrics for point in metric.data.data_points]
    assert len(points) == len(samples)
    [tokens] = [it for it in scope.metrics if it.name == "tba_trainer_tokens"]
    assert tokens.data.is_monotonic
    assert json.loads(data.to_json())["resource_metrics"]


def test_a_token_is_required_if_there_is_one():
    client = TestClient(make_app(list, "secret"))
    assert client.get("/metrics").status_code == 401
    assert client.get("/metrics", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/metrics", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert client.get("/healthy").text == "ok\n"
    assert client.post("/metrics").status_code == 405


def test_on_this_machine_no_foreign_name_leads_to_the_metrics():
    client = TestClient(make_app(list, names=["127.0.0.1", "[::1]"]), base_url="http://127.0.0.1:9469")
    assert client.get("/metrics").status_code == 200
    assert client.get("/metrics", headers={"Host": "[::1]:9469"}).status_code == 200
    assert client.get("/metrics", headers={"Host": "example.org"}).status_code == 400


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "::1"])
def test_the_address_that_is_listened_on_is_a_local_name(host: str):
    with listen(host, 0, host_option="--listen", port_option="--listen") as listening:
        names = local_names(listening)
        assert {"127.0.0.1", "localhost", "[::1]", f"[{host}]" if ":" in host else host} == set(names)


def test_other_addresses_have_no_local_names():
    with listen("0.0.0.0", 0, host_option="--listen", port_option="--listen") as listening:
        assert not local_names(listening)


@local
def test_a_local_folder_comes_before_a_name_under_a_remote_root(
    root: str, finished: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("TBA_ROOT", "s3://nobody-has-this/x")
    monkeypatch.chdir(Path(root).parent)
    said = printed(capsys, "metrics", Path(root).name, "--once")
    assert "tba_root_runs{" in said
    assert "nobody-has-this" not in said


@local
def test_the_command_prints_once(root: str, live: Run, capsys: pytest.CaptureFixture[str]):
    families = {family.name for family in parse(printed(capsys, "metrics", root, "--once"))}
    assert {"tba_up", "tba_run_step", "tba_searcher_tokens"} <= families
    assert main(["metrics", "s3:///nowhere", "--once"]) != 0


@local
def test_a_port_that_is_taken_is_named(live: Run, capsys: pytest.CaptureFixture[str]):
    assert "--listen: no machine is named" in refused(capsys, "metrics", live.url, "--listen", "no such host:1")
    with pytest.raises(SystemExit):
        main(["metrics", live.url, "--listen", "127.0.0.1"])
    assert "HOST:PORT with a port from 0 to 65535, got '127.0.0.1'" in capsys.readouterr().err


@local
def test_a_scraper_gets_the_metrics_by_http_until_ctrl_c(live: Run):
    command = [sys.executable, "-m", "flows.cli", "metrics", live.url, "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout
    said = process.stdout.readline()
    [address] = re.findall(r"http://\S+/metrics", said)
    with urllib.request.urlopen(address, timeout=60) as answer:
        families: dict[str, Any] = {family.name: family for family in parse(answer.read().decode())}
    assert families["tba_run_up"].samples[0].value == 1
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == 0
