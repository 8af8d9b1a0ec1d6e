"""`tba import`: responses from elsewhere are trained on like any other, or refused by the row at fault."""

import json
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import s3fs

from benchmarks.harness.servers import Server
from benchmarks.harness.step_queries import DRAWS, LEDGER
from benchmarks.harness.tiny_models import EOS_ID, tiny_folder, tiny_tokenizer
from flows.cli import main
from flows.commands import audit, fork
from flows.commands.compact import compact_run
from flows.commands.import_rows import around_difference
from flows.planning import create
from flows.roles import wiring
from storage import layout
from storage.log.prompts import read_prompts
from storage.maintenance.check import check
from storage.runs.leases import read_leases
from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.errors import DeadlinePassed
from tba.models.policy import Policy, PolicyScorer
from tba.types import Prompt, Version
from tests.conftest import s3_root
from tests.support.flows.closeness import response
from tests.support.flows.command_line import DEADLINE, opened, tba
from tests.support.flows.killed_runs import rows
from tests.support.flows.live_roles import live, settings
from tests.support.flows.roles import TINY
from tests.support.waiting import until

STEPS, K = 8, 4
DRAWN = "select distinct d.trajectory_id from draws d, trajectories t"
LEARNING = {
    "training.steps": STEPS,
    "training.responses_per_prompt": K,
    "search.initial_fill": 16,
    "sync.checkpoint_every": 1,
    "limits.data_deadline": 2.0,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_folder(tmp_path_factory.mktemp("policy") / "tiny")


def begun(policy: Path, root: str, **changes: object) -> Run:
    """Return a run whose trainer has stored its first objects, and then ended because no searcher generates."""
    run = create.start(settings(policy, **{**LEARNING, **changes}), root, "taken")
    [ended] = live(run, "trainer", wiring.run_trainer)
    assert isinstance(ended, DeadlinePassed)
    return run


@pytest.fixture(scope="module")
def empty(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run into which nothing is imported."""
    return begun(policy, str(tmp_path_factory.mktemp("root")))


def given(run: Run, prompts: int = 6, responses: int = K, first: int = 0) -> list[dict[str, Any]]:
    """Return rows with right and wrong answers to some prompts. All answers differ."""
    asked = read_prompts(run, "train")[first : first + prompts]
    answers = [[it.answer, *(f"{it.answer}{n}" for n in range(1, responses))] for it in asked]
    return [{"prompt_id": it.prompt_id, "response": said} for it, of in zip(asked, answers, strict=True) for said in of]


def written(path: Path, found: Sequence[Mapping[str, Any]]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in found))
    return str(path)


def imported(run: Run, *arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["import", run.url, *arguments]) == 0
    return capsys.readouterr().out


def test_a_run_learns_from_imports_alone_and_so_does_a_fork_which_may_import_more(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = begun(policy, str(tmp_path / "root"))
    found = given(run)
    told = imported(run, written(tmp_path / "a.jsonl", found), capsys=capsys)
    assert "24 responses to 6 prompts, 24 of them to be scored by the task" in told
    assert live(run, "trainer", wiring.run_trainer) == []
    assert len(rows(run, f"{DRAWN} where d.trajectory_id = t.trajectory_id and searcher >= {layout.IMPORTS}")) > K
    assert rows(run, "select count(*) from draws") == [(STEPS * 4 * K,)]
    assert rows(run, "select response, reward from trajectories where reward = 1 order by prompt_id") == [
        (row["response"], 1.0) for row in found[::K]
    ]
    same, further = (fork.fork(run, 4, {}, name=name) for name in ("same", "further"))
    more = written(tmp_path / "b.jsonl", given(run, first=6))
    imported(further, more, capsys=capsys)
    for forked in (same, further):
        assert live(forked, "trainer", wiring.run_trainer) == []
    assert rows(same, LEDGER) == rows(run, LEDGER) and rows(same, DRAWS) == rows(run, DRAWS)
    news = "(select prompt_id from trajectories where sync > 0)"
    assert rows(further, f"select min(step) > 4, count(*) > 0 from draws where prompt_id in {news}") == [(True, True)]
    compact_run(run)
    for it in (run, same, further):
        assert check(it).problems == [] and audit.audit(it, STEPS).ok
    assert main(["import", run.url, more]) == 2
    assert (
        "has finished and cannot admit them: import into a fork, made by `tba fork taken --step 8"
        in capsys.readouterr().err
    )


@pytest.mark.long
@pytest.mark.slow
def test_a_run_without_searchers_learns_from_imports_some_of_which_come_while_it_learns(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log, root = tmp_path / "tba.log", str(tmp_path / "root")
    changes = {
        **TINY, "model.path": policy, "search.searchers": 0, "search.initial_fill": 6 * K, "training.steps": 10**6,
        "training.responses_per_prompt": K, "sync.keep_versions": 1000,
    }  # fmt: skip
    given_settings = [f"{key}={value}" for key, value in changes.items()]
    going = tba("run", "quickstart", "--root", root, "--name", "r", "--set", *given_settings, log=log)
    try:
        run = until(lambda: opened(f"{root}/runs/r"), "the run is created", DEADLINE, log=log)
        until(lambda: Versions(run).complete(), "there is a version 0", DEADLINE, log=log)
        imported(run, written(tmp_path / "a.jsonl", given(run)), capsys=capsys)
        newest = until(lambda: Versions(run).complete()[-1].number, "there is a version 1", DEADLINE, log=log)
        imported(run, written(tmp_path / "b.jsonl", given(run, first=6)), "--version", str(newest), capsys=capsys)
        drawn = f"{DRAWN} where d.trajectory_id = t.trajectory_id and version_start = {newest}"
        until(lambda: rows(run, drawn), "a row of the second import is drawn", DEADLINE, log=log)
        assert main(["stop", run.url]) == 0 and going.wait(60) != 0
    finally:
        going.terminate()
    assert check(run).problems == []
    assert newest > 0 and rows(run, "select version_start, count(*) from trajectories group by 1 order by 1") == [
        (0, 6 * K), (newest, 6 * K),
    ]  # fmt: skip
    assert sorted(it.role for it in read_leases(run)) == ["evaluator", "supervisor", "trainer"]


def test_a_policy_learns_to_prefer_imported_responses_with_a_reward(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    changes = {"training.steps": 40, "training.learning_rate": 1e-2, "search.temperature": 1.0}
    run = begun(policy, str(tmp_path / "root"), **changes)
    found = given(run, prompts=4)
    imported(run, written(tmp_path / "a.jsonl", found), capsys=capsys)
    assert live(run, "trainer", wiring.run_trainer) == []
    versions = Versions(run)
    before, after = (right(versions.load(it), run) for it in (versions.complete()[0], versions.complete()[-1]))
    assert min(new - old for old, new in zip(before, after, strict=True)) > 1.0


def right(folder: Path, run: Run) -> list[float]:
    """Return, for each prompt, the mean log-probability of its right responses minus that of its other responses."""
    stored = rows(run, "select prompt_id, prompt_tokens, response_tokens, reward from trajectories order by all")
    loaded, gaps = PolicyScorer(Policy.load(folder), Version(0, 1)), dict[str, list[list[float]]]()
    for prompt_id, prompt_tokens, tokens, reward in stored:
        prompt = Prompt(prompt_id=prompt_id, text="", tokens=tuple(prompt_tokens))
        [[logps]] = loaded.token_logps([prompt], [[response(tuple(tokens))]], temperature=1.0)
        gaps.setdefault(prompt_id, [[], []])[int(reward)].append(sum(logps))
    return [sum(good) / len(good) - sum(bad) / len(bad) for bad, good in gaps.values()]


KILLED = """
import os, signal, sys
from flows import cli
from flows.commands import import_
store = import_._store
def second(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
def first(*arguments):
    store(*arguments)
    import_._store = second
import_._store = first
cli.main(sys.argv[1:])
"""


@pytest.mark.long
@pytest.mark.parametrize("root", ["moto"], indirect=True)
def test_a_killed_import_leaves_whole_files_and_the_same_command_finishes_it(
    policy: Path, root: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run = begun(policy, root, **{"training.steps": 2})
    files = [written(tmp_path / name, given(run, first=first)) for name, first in (("a.jsonl", 0), ("b.jsonl", 6))]
    done = subprocess.run([sys.executable, "-c", KILLED, "import", run.url, *files], capture_output=True)
    assert done.returncode == -signal.SIGKILL
    assert len(run.store.list(layout.TRAJECTORIES)) == 1
    told = imported(run, *files, capsys=capsys).splitlines()
    assert "a.jsonl: imported already" in told[0] and "b.jsonl: 24 responses" in told[1]
    assert len(run.store.list(layout.TRAJECTORIES)) == 2
    assert live(run, "trainer", wiring.run_trainer) == []
    assert rows(run, "select count(*), count(distinct content_hash) from trajectories") == [(48, 48)]
    assert rows(run, "select count(*) from events where kind = 'imported'") == [(2,)]
    assert check(run).problems == []


def test_the_same_rows_in_another_form_are_the_same_import(
    empty: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    found = [*given(empty, prompts=2), {"prompt_id": "train-00000", "response": ""}]
    prompts = {it.prompt_id: it for it in read_prompts(empty, "train")}
    others = [
        {"question": prompts[row["prompt_id"]].text, "completion": row["response"], "id": n}
        for n, row in enumerate(reversed(found))
    ]
    folder, tokenizer = tmp_path / "set", tiny_tokenizer()
    (folder / "data").mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(others), folder / "data" / "train.parquet")
    names = ("--map", "prompt=question", "response=completion")
    [one] = imported(empty, written(tmp_path / "a.jsonl", found), "--dry-run", capsys=capsys).splitlines()[:1]
    [two] = imported(empty, str(folder), "--dry-run", *names, capsys=capsys).splitlines()[:1]
    tokens = {row["response"]: [*tokenizer(row["response"])["input_ids"], EOS_ID] for row in found}
    third = [{"prompt_id": row["prompt_id"], "response_tokens": tokens[row["response"]]} for row in found]
    [three] = imported(empty, written(tmp_path / "c.jsonl", third), "--dry-run", capsys=capsys).splitlines()[:1]
    assert "9 responses" in one and len({it.rpartition(" ")[2] for it in (one, two, three)}) == 1
    assert empty.store.list(layout.TRAJECTORIES) == []


@pytest.mark.parametrize(
    ("unread", "is_taken"),
    [
        (pa.array([1_700_000_000_123_456_789], pa.timestamp("ns")), True),
        (pa.array([10**15], pa.timestamp("ms")), True),
        (pa.array([0], pa.timestamp("us", tz="Nowhere/Land")), True),
        (pa.array([1], pa.duration("ns")), True),
        (None, False),
    ],
)
def test_a_column_that_is_not_read_may_have_any_type(
    empty: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], unread: pa.Array | None, is_taken: bool
):
    columns = {"prompt_id": pa.array(["train-00000"]), "response": pa.array(["12"])}
    columns |= {"when": unread} if unread is not None else {}
    table = pa.table(columns)
    table = table if is_taken else table.append_column("response", pa.array(["3"]))
    pq.write_table(table, tmp_path / "rows.parquet")
    assert main(["import", empty.url, str(tmp_path / "rows.parquet"), "--dry-run"]) == (0 if is_taken else 2)
    out, error = capsys.readouterr()
    assert "1 responses to 1 prompts" in out if is_taken else "more than one column 'response'" in error
    assert main(["import", empty.url, str(tmp_path / "rows.parquet"), "--map", "reward=when"]) == 2
    assert "rows.parquet" in capsys.readouterr().err


def test_another_file_with_the_number_of_one_that_was_imported_is_refused(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(layout, "imported", lambda sha256: 1_234_567_890)
    run = begun(policy, str(tmp_path / "root"))
    one, two = (written(tmp_path / f"{n}.jsonl", [{**GOOD, "reward": n}]) for n in (1, 2))
    assert main(["import", run.url, one, "--dry-run"]) == 0
    assert main(["import", run.url, one]) == 0
    assert main(["import", run.url, two]) == 2
    assert "2.jsonl: another file was imported under its number, 1234567890" in capsys.readouterr().err
    assert "imported already" in imported(run, one, capsys=capsys)


def test_files_are_scored_and_stored_one_after_the_other(
    policy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    run = begun(policy, str(tmp_path / "root"))
    one, two = (written(tmp_path / f"{n}.jsonl", [{**GOOD, "reward": n}]) for n in (1, 2))
    scored: list[int] = []
    reached = PolicyScorer.token_logps

    def token_logps(self: PolicyScorer, *given: Any, **options: Any) -> Any:
        scored.append(1)
        if len(scored) == 2:
            raise KeyboardInterrupt
        return reached(self, *given, **options)

    monkeypatch.setattr(PolicyScorer, "token_logps", token_logps)
    assert main(["import", run.url, one, two]) == 130
    assert len(run.store.list(layout.TRAJECTORIES)) == 1
    told = imported(run, one, two, capsys=capsys).splitlines()
    assert "1.jsonl: imported already" in told[0] and "2.jsonl: 1 responses" in told[1]


def test_a_dataset_that_lies_in_a_bucket_with_decimals_and_names_of_its_own_is_the_same_import(
    empty: Run, tmp_path: Path, moto: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    root, system = s3_root(moto, monkeypatch), s3fs.S3FileSystem(endpoint_url=moto.endpoint)
    found = [
        {"prompt_id": "train-00000", "response": "12", "reward": Decimal("0.5")},
        {"prompt_id": "train-00001", "response": "3", "reward": Decimal("-1.0")},
    ]
    pq.write_table(pa.Table.from_pylist(found), tmp_path / "part.parquet")
    plain = written(tmp_path / "a.jsonl", [{**it, "reward": float(it["reward"])} for it in found])
    system.put(str(tmp_path / "part.parquet"), f"{root}/a set/data/train (1).parquet")
    system.put(plain, f"{root}/ü/a b.jsonl")
    names = (plain, f"{root}/a set", f"{root}/a set/data/*.parquet", f"{root}/ü/a b.jsonl", f"{root}/ü/*.jsonl")
    told = [imported(empty, name, "--dry-run", capsys=capsys).splitlines()[0] for name in names]
    assert "2 responses to 2 prompts, as searcher" in told[0]
    assert len({it.rpartition(" ")[2] for it in told}) == 1


def test_a_prompt_that_is_held_out_is_known_by_its_text(empty: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    row = {"prompt": read_prompts(empty, "test")[0].text, "response": "2"}
    assert main(["import", empty.url, written(tmp_path / "a.jsonl", [row])]) == 2
    assert "is held out for evaluation" in capsys.readouterr().err


def test_two_long_prompts_are_shown_from_where_they_differ(
    empty: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    asked = read_prompts(empty, "train")[0]
    row = {"prompt_id": asked.prompt_id, "prompt": asked.text[:3] + "~" * 99, "response": "2"}
    assert main(["import", empty.url, written(tmp_path / "a.jsonl", [row])]) == 2
    assert f"~ is not what the run asks as 'train-00000': {asked.text!r}" in capsys.readouterr().err
    assert around_difference("x" * 99 + "1+2=", "x" * 99 + "2+1=") == (f"…'{'x' * 20}1+2='", f"…'{'x' * 20}2+1='")


GOOD = {"prompt_id": "train-00000", "response_tokens": [3, 4, 1]}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"response": "1"}, "prompt_id or prompt is needed"),
        ({**GOOD, "prompt_id": "train-99999"}, "'train-99999' is no prompt of the run"),
        ({**GOOD, "prompt_id": "test-00000"}, "'test-00000' is held out for evaluation"),
        ({**GOOD, "prompt": "1+1="}, "prompt '1+1=' is not what the run asks as 'train-00000'"),
        ({"prompt": "1+1=", "response": "2"}, "prompt '1+1=' is no prompt of the run, whose first is"),
        ({"prompt_id": 3, "response": "2"}, "prompt_id must be text, got 3"),
        ({"prompt_id": "train-00000", "completion": "2"}, "response or response_tokens is needed (it has 'prompt_id',"),
        ({"prompt_id": "train-00000", "response": "", "finished": False}, "must have 1 to 16 tokens"),
        ({"prompt_id": "train-00000", "response": "~"}, "characters that the tokenizer does not know"),
        ({**GOOD, "response_tokens": []}, "must have 1 to"),
        ({**GOOD, "response_tokens": [3] * 99}, "(search.max_response_tokens), got 99"),
        ({**GOOD, "response_tokens": [3, 999, 1]}, "response_tokens must be 0 to"),
        ({**GOOD, "response_tokens": [3, 1.5]}, "must be a list of whole numbers, got [3, 1.5]"),
        ({**GOOD, "response_tokens": [1, 3]}, "goes on after end token 1"),
        ({**GOOD, "finished": False}, "finished is False, but the last token is an end token"),
        ({**GOOD, "response": "7"}, "response_tokens say '01', but response '7'"),
        ({**GOOD, "reward": float("nan")}, "reward must be a number of at most 1e+100 in size, got nan"),
        ({**GOOD, "reward": True}, "reward must be a number"),
        ({**GOOD, "reward": 10**400}, "reward must be a number of at most 1e+100 in size, got 1000"),
        ({"prompt_id": "train-00000", "response": "12<pad>3"}, "has '<pad>' in it, a token and no text"),
        ({"prompt_id": "train-00000", "response": "\ud800"}, "response has half a character in it: '\\ud800'"),
        ({**GOOD, "behaviour_logps": [-1.0, -1e39, 0.0]}, "behaviour_logps must be a list of numbers from -1e+30 to 0"),
        ({**GOOD, "behaviour_logps": [-1.0]}, "behaviour_logps must be as many as response_tokens, 3, got 1"),
        ({**GOOD, "behaviour_logps": [-1.0, 0.5, 0.0]}, "behaviour_logps must be a list of numbers from -1e+30 to 0"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named_and_nothing_is_stored(
    empty: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], row: Mapping[str, Any], said: str
):
    good, bad = (written(tmp_path / name, found) for name, found in (("a.jsonl", [GOOD]), ("b.jsonl", [GOOD, row])))
    assert main(["import", empty.url, good, bad]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: {tmp_path}/b.jsonl line 2: ") and said in error
    assert empty.store.list(layout.TRAJECTORIES) == []


def test_a_row_that_gives_a_field_twice_is_named_and_nothing_is_stored(
    empty: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    line = json.dumps({**GOOD, "reward": 1})
    (tmp_path / "a.jsonl").write_text(f'{line}\n{line[:-1]}, "reward": 0}}\n')
    assert main(["import", empty.url, str(tmp_path / "a.jsonl")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error == f"error: {tmp_path}/a.jsonl line 2: key 'reward' is given more than once"
    assert empty.store.list(layout.TRAJECTORIES) == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--map", "answer=x"], "--map: FIELD=NAME where FIELD is one of prompt_id, prompt, response"),
        (["--version", "3"], "--version: taken keeps no version 3"),
        (
            ["--map", "reward=scroe"],
            "a.jsonl has 'scroe', which should become reward; its first row has 'prompt_id', 'response_tokens'",
        ),
        (["--map", "reward=a", "reward=b"], "--map: reward cannot be 'a' and 'b'"),
    ],
)
def test_options_that_do_not_fit_the_run_or_the_rows_are_refused(
    empty: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
):
    assert main(["import", empty.url, written(tmp_path / "a.jsonl", [GOOD]), *arguments]) == 2
    assert said in capsys.readouterr().err
