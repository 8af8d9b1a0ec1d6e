"""`tba grade`: the rewards that it adds to a file of responses, and the lines that it refuses."""

import json
from pathlib import Path

import pytest

from flows.cli import main
from tests.support.flows.command_line import printed, refused


def test_grade_adds_the_reward_to_each_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "responses.jsonl"
    rows = [{"response": "the answer is 5", "answer": "5", "id": 1}, {"response": "it is 6", "answer": "5", "id": 2}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    assert main(["grade", "gsm8k", str(file)]) == 0
    out, said = capsys.readouterr()
    assert [json.loads(line) for line in out.splitlines()] == [{**rows[0], "reward": 1.0}, {**rows[1], "reward": 0.0}]
    assert "mean reward 0.5" in said


def test_grade_takes_a_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "responses.jsonl"
    file.write_text(json.dumps({"response": "it is 5", "answer": "5"}) + "\n")
    assert json.loads(printed(capsys, "grade", "gsm8k", str(file), "--rule", "last-number"))["reward"] == 1.0
    assert json.loads(printed(capsys, "grade", "gsm8k", str(file), "--rule", "after-hashes"))["reward"] == 0.0
    assert json.loads(printed(capsys, "grade", "math", str(file), "--rule", "minerva"))["reward"] == 1.0
    assert json.loads(printed(capsys, "grade", "math", str(file)))["reward"] == 0.0  # without a box


@pytest.mark.parametrize("line", ["{", "[]", '{"response": "5"}', '{"response": "5", "answer": 5}'])
def test_grade_names_the_line_at_fault(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "responses.jsonl"
    file.write_text(f"\n{line}\n")
    assert f"{file} line 2" in refused(capsys, "grade", "gsm8k", str(file))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"response": "5", "answer": "5", "response": "6"}', "key 'response' is given more than once"),
        ("[" * 100_000, "not JSON: it is nested too deeply"),
    ],
    ids=["twice", "deep"],
)
def test_grade_says_what_is_wrong_with_a_line(line: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (file := tmp_path / "responses.jsonl").write_text(f"\n{line}\n")
    assert refused(capsys, "grade", "gsm8k", str(file)) == f"error: {file} line 2: {said}\n"


def test_grade_refuses_unknown_tasks_rules_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "responses.jsonl"
    file.write_text("")
    assert "nonsense" in refused(capsys, "grade", "nonsense", str(file))
    assert "nonsense" in refused(capsys, "grade", "gsm8k", str(file), "--rule", "nonsense")
    assert "No such file" in refused(capsys, "grade", "gsm8k", str(tmp_path / "nothing"))
