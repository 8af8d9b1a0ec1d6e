"""The task that docs/tasks.md writes, run as it says: from the folder where its file lies."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import storage
from storage.run import Run
from tests.flows.roles import TINY
from tests.tba.tiny import tiny_folder

PAGE = Path(__file__).parents[2] / "docs" / "tasks.md"


@pytest.mark.slow
def test_the_task_of_the_documentation_runs_from_the_folder_of_its_file(tmp_path: Path):
    written = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert written
    (tmp_path / "reverse.py").write_text(written[1])
    changes = {"model.path": tiny_folder(tmp_path / "policy"), **TINY}
    command = [str(Path(sys.executable).with_name("tba")), "run", "reverse:Reverse", "--root", "here", "--steps", "8"]
    for key, value in changes.items():
        command += ["--set", f"{key}={value}"]
    told = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert told.returncode == 0, told.stderr
    (folder,) = (tmp_path / "here" / "runs").iterdir()
    assert folder.name.startswith("Reverse-2")
    with storage.connect(Run.open(str(folder))) as con:
        wrong = con.execute(
            """select response, answer, reward from trajectories join prompts using (prompt_id)
            where reward <> list_sum([(response[i] = answer[i])::int for i in range(1, 4)]) / 3"""
        ).fetchall()
        parts = con.execute("select bool_and(reward_parts['letters'] = length(response)) from trajectories").fetchone()
        asked = con.execute("select split, count(*) from prompts group by 1 order by 1").fetchall()
        steps = con.execute("select count(*) from steps").fetchone()
    assert (wrong, parts, asked, steps) == ([], (True,), [("test", 36), ("train", 72)], (8,))
