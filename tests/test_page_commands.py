"""Every command and query on the pages is run on a small finished run, unless it is excused. An excuse says why a
command is not run, and what is checked instead. A command that is neither run nor excused fails its page's test."""

import ast
import io
import re
import secrets
import shlex
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

import storage
from benchmarks.harness.tiny_models import tiny_folder
from flows.cli import build_parser
from storage.log.trajectories import Trajectories
from tests.support.builders import make_trajectory
from tests.support.flows.roles import TINY
from tests.support.pages import PAGES, ROOT
from tests.support.sampled_parameters import sampled
from tests.support.storage.synthetic import make_live_run

STEPS, CHECKPOINT, VERSION = 12, 8, 6
WORDS = (
    "apt-get", "aws", "cd", "docker", "export", "for", "git", "helm", "kind", "kubectl", "lm-eval/bin/lm_eval",
    "lm-eval/bin/pip", "make", "minikube", "mkdir", "pip", "prefect", "python", "python3", "python3.11", "tba",
    r"\.venv/bin/\S+", "HF_HUB_OFFLINE=1", r"PYTHONPATH=\S+",
)  # fmt: skip
"""In a block without a language, a line that begins with one of these words is a command."""
A_BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.M | re.S)
INDENTED = re.compile(r"^    \S.*\n(?:    .*\n)*", re.M)
BEGINS = re.compile(rf"(?:{'|'.join(WORDS)})(?= |$)")
ASKS = re.compile(r"(?:select|from|with)\b")
BACKSLASH = "\\"
OF_A_SHELL, OF_SQL = ("sh", "console", "bash"), ("sql",)


@dataclass(frozen=True)
class Command:
    kind: str  # sh, sql or python
    text: str


# --- the commands of a page -------------------------------------------------------------------------------------------


def commands(page: str) -> Iterator[Command]:
    """Yield the commands, queries and Python code of a page, in their order."""
    found = [(it.start(), it[2], _without(it[1], it[3])) for it in A_BLOCK.finditer(page)]
    others = A_BLOCK.sub(lambda it: re.sub(r"[^\n]", "-", it[0]), page)
    found += [(it.start(), "", _without("    ", it[0])) for it in INDENTED.finditer(others)]
    for _, language, block in sorted(found):
        if language == "python":
            yield Command("python", block)
        elif language in OF_SQL or (not language and ASKS.match(block)):
            yield Command("sql", block.strip())
        elif language in ("", *OF_A_SHELL):
            yield from (Command("sh", it) for it in lines(block, language))


def _without(indent: str, block: str) -> str:
    return re.sub(f"^{indent}", "", block, flags=re.M)


def lines(block: str, language: str) -> Iterator[str]:
    """Yield the commands of a block, each as one line. If the block shows prompts, its other lines are output."""
    shown = re.search(r"^\$ ", block, re.M)
    rest = block.splitlines()
    while rest:
        line = rest.pop(0)
        if line.startswith("$ ") if shown else language in OF_A_SHELL or BEGINS.match(line):
            line = _bare(line.removeprefix("$ "))
            while line.endswith("\\") or _is_open(line):
                line = f"{line.removesuffix(BACKSLASH).rstrip()} {_bare(rest.pop(0).strip())}"
            if line:
                yield line


def _bare(line: str) -> str:
    """Return a command without the remark beside it, which follows a # or stands far to the right."""
    for mark in re.finditer(r"(?:^|\s+)#.*|\s{3,}[\w(].*", line):
        if not _is_open(line[: mark.start()]):
            return line[: mark.start()].strip()
    return line.strip()


def _is_open(text: str) -> bool:
    """Return True if the text has a quotation mark that is not closed."""
    try:
        shlex.split(text)
    except ValueError as error:
        return "quotation" in str(error)
    return False


# --- running them -----------------------------------------------------------------------------------------------------


def is_a_target(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    variables = dict(re.findall(r"^(\w+) +:= (\S+)$", text, re.M))
    named = re.findall(r"^([\w./$()-]+):", text, re.M)
    known = [re.sub(r"\$\((\w+)\)", lambda it: variables.get(it[1], ""), it) for it in named]
    asked = takewhile(lambda it: "=" not in it, words[words.index("make") + 1 :])
    assert [it for it in asked if it not in known] == []


def has_its_files(words: list[str]) -> None:
    files = [file for flag, file in pairwise(words) if flag in ("-r", "-c")]
    assert [it for it in files if not (ROOT / it).exists()] == []


def has_its_options(words: list[str]) -> None:
    """Check that the source of one of our modules has every option of the command."""
    source = (ROOT / f"{words[2].replace('.', '/')}.py").read_text()
    assert [it for it in words[3:] if it.startswith("--") and f'"{it}"' not in source] == []


def is_a_deployment(words: list[str]) -> None:
    """Check that the deployment is ours, and that its flow takes the parameters of the command."""
    flow, _, name = words[3].partition("/")
    assert f"<<: *{flow}, name: {name}" in (ROOT / "prefect.yaml").read_text()
    module = {"tba": "flow", "trainer-node": "role_flows", "compact": "upkeep"}[flow]
    defined = ast.parse((ROOT / f"flows/orchestration/{module}.py").read_text()).body
    (function,) = (it for it in defined if isinstance(it, ast.FunctionDef) and it.name == flow.replace("-", "_"))
    given = {it.partition("=")[0] for flag, it in pairwise(words) if flag == "--param"}
    assert given <= {it.arg for it in (*function.args.args, *function.args.kwonlyargs)}


@dataclass(frozen=True)
class Excuse:
    """Why a command is not run here, and what is checked instead."""

    begins: str  # pattern for the beginning of the command
    reason: str
    look: Callable[[list[str]], None] = lambda words: None


EXCUSES = [
    Excuse("make |PYTHONPATH=.* make ", "it installs, or takes minutes to days", is_a_target),
    Excuse(
        "python -m benchmarks.science.speed",
        "as below",
        lambda words: has_its_options([*words[:2], "benchmarks.science.race", *words[3:]]),
    ),
    Excuse("python -m benchmarks", "it measures for minutes to days, and writes into the repository", has_its_options),
    Excuse(
        "python -m flows.stack",
        "tests/flows/orchestration/test_local_server.py starts one",
        lambda words: has_its_options([*words[:2], "flows.orchestration.local_server", *words[3:]]),
    ),
    Excuse("prefect deployment run", "tests/flows run deployments on a server of their own", is_a_deployment),
    Excuse("prefect (server|worker) start|prefect --no-prompt deploy|for pool in .* work-pool create", "as above"),
    Excuse(r"(\S*python3? -m |\S*)pip (install|download)", "it reaches a registry", has_its_files),
    Excuse(r"python\S* -m venv", "it takes seconds, and is not ours"),
    Excuse("(HF_HUB_OFFLINE=1 )?lm-eval/bin/lm_eval", "lm-eval has an environment of its own, and needs the hub"),
    Excuse(r"tba sql \S+$", "it asks, and waits for answers: tests/flows/commands/test_sql.py"),
    Excuse("export ", "it names places that are not here"),
    Excuse("tba export .* --adapter", "this run has no adapters: tests/flows/runs/test_lora.py"),
    Excuse("tba give-up \\S+ traj", "this run has lost no shard: tests/flows/commands/test_give_up.py"),
    Excuse("tba browse ", "it serves pages until it is ended: tests/flows/pages/browse/test_browse_command.py"),
    Excuse("tba metrics ", "it answers scrapes until it is ended: tests/flows/metrics/test_server.py"),
    Excuse("tba import ", "this run has finished, and other prompts: tests/flows/commands/test_import.py"),
    Excuse("tba wandb ", "W&B has processes of its own: tests/storage/metrics/test_metric_log.py"),
    Excuse("tba run .* model.path=package:", "the package is not installed: tests/tba/models/test_gguf.py"),
    Excuse("tba run instructions", "the library is an extra: tests/flows/runs/tasks/test_instructions.py"),
    Excuse("tba run redteam-laptop", "its packages are extras: tests/flows/runs/tasks/test_redteam.py"),
    Excuse("tba run verifiers", "the library is an extra: tests/flows/runs/tasks/test_verifiers.py"),
    Excuse("tba run reasoning-gym", "the library is optional: tests/flows/runs/tasks/test_reasoning_gym.py"),
    Excuse(
        "tba run .* search.prompts_from",
        "the run has prompts of another task: tests/storage/queries/test_difficulty.py",
    ),
]
if (ROOT / "docs/kubernetes.md").exists():
    EXCUSES.append(Excuse("(kubectl|helm|docker|kind|minikube) ", "it changes a machine or a cluster"))
"""The parser still reads an excused command of `tba`, and tests/test_pages.py checks its settings."""
CODE = [
    Excuse('"""Add two numbers', "tests/flows/runs/tasks/test_task_from_outside.py trains on it"),
    Excuse('"""Questions of a file', "as above"),
    Excuse("from tba.config import parse_options", "a part of it; tests/tba/tasks/test_registry.py parses options"),
    Excuse(r"\s*def (reply|step_ends)", "methods of a task: tests/flows/runs/tasks/test_turns.py, tests/tba/tasks"),
    Excuse("import re\n\nimport verifiers", "the library is an extra: tests/flows/runs/tasks/test_verifiers.py"),
    Excuse("import random\n", "tests/flows/runs/tasks/test_redteam.py runs it"),
]
"""Excuses for Python code on the pages."""


KEPT = ("README.md", "quickstart.md", "commands.md", "sql.md", "storage.md", "operating.md")
"""Pages whose commands `make test` runs, too."""
RUN = [page for page in PAGES if page.name != "extending.md"]  # tests/flows/runs/test_extending.py runs that page


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a root with a finished run, `first`, made by the quickstart's command with real roles, and a live run."""
    root = tmp_path_factory.mktemp("root")
    settings = {"model.path": tiny_folder(tmp_path_factory.mktemp("models") / "policy"), **TINY, "evaluation.every": 3}
    changes = [f"{key}={value}" for key, value in settings.items()]
    tba = [sys.executable, "-m", "flows.cli", "run", "quickstart", "--name", "first", "--root", root, "--set", *changes]
    done = subprocess.run([*tba, "--steps", str(STEPS)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    right, wrong = (
        make_trajectory(response=text, reward=reward, tokens=(slot, 2), searcher=7, slot=slot)
        for slot, (text, reward) in enumerate({"3": 1.0, "4": 0.0}.items())
    )
    Trajectories(make_live_run(str(root))).append(7, 0, [right, wrong])  # a preference pair
    return root


@pytest.fixture
def place(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder where the commands of a page are run. It has the files that they read."""
    for name, value in {"TBA_ROOT": root, "TBA_CACHE": tmp_path / "cache", "COLUMNS": "100"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.chdir(tmp_path)
    Path("question.sql").write_text("from steps")
    Path("responses.jsonl").write_text('{"response": "It is 4.", "answer": "4"}\n')
    for name in ("train", "test"):
        Path(f"{name}.jsonl").write_text('{"question": "What is 2 + 2?", "answer": "It is 4.\\n#### 4"}\n')
    for name in ("posts", "held-out"):
        Path(f"{name}.jsonl").write_text('{"query": "A post.\\nTL;DR:", "reference_response": " Short."}\n')
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "page", sampled(RUN, kept=[page for page in RUN if page.name in KEPT]), ids=[page.name for page in RUN]
)
def test_the_commands_of_a_page_can_be_run(page: Path, root: Path, place: Path):
    for name, code in re.findall(
        r"in a file `(\w+\.py)`(?:[^\n]|\n(?!\n))*?:\n\n```python\n(.*?)```", page.read_text(), re.S
    ):
        Path(name).write_text(code)
    with storage.connect(f"{root}/runs/first") as con:
        for command in commands(page.read_text()):
            match command.kind:
                case "sql":
                    con.execute(command.text).fetchall()
                case "python":
                    run_code(command.text, root)
                case _:
                    run(command.text, root)


def run(text: str, root: Path) -> None:
    """Run a command in this process, or check it as its excuse says."""
    words = shlex.split(text)
    arguments = list(takewhile(lambda it: it != ">", words[1:]))
    options = build_parser().parse_args(arguments) if words[0] == "tba" else None
    excuse = next((it for it in EXCUSES if re.match(it.begins, text)), None)
    if excuse:
        excuse.look(words)
    elif words[0] == "mkdir":
        Path(words[-1]).mkdir()
    else:
        assert options, f"neither run here nor excused: {text}"
        fit(options, root)
        with redirect_stdout(io.StringIO()) as said:
            assert options.command(options) == 0, f"{text}: {said.getvalue()}"
        if ">" in words:
            Path(words[-1]).write_text(said.getvalue())


def run_code(text: str, root: Path) -> None:
    """Run Python code, unless it is excused."""
    if not any(re.match(it.begins, text) for it in CODE):
        for there, here in (("tba-runs/runs/NAME", "first"), ("s3://bucket/prefix/runs/first", "live")):
            text = text.replace(there, f"{root}/runs/{here}")
        with redirect_stdout(io.StringIO()):
            exec(compile(text, "a page", "exec"), {"__name__": "a_page"})


def fit(options: Namespace, root: Path) -> None:
    """Fit the options of a command to the runs of this test: names, numbers, and options that would take long."""
    here = vars(options)
    match options.command.__module__.rpartition(".")[2]:
        case "run":
            here.update(dry_run=True, root="runs")
        case "fork":
            here.update(no_start=True, name=f"fork-{secrets.token_hex(4)}", step=min(options.step, CHECKPOINT))
        case "watch":
            here.update(once=True)
        case "scale":
            here.update(run="live")
        case "audit":
            here.update(step=STEPS)
        case "export" if options.query:
            here.update(run="live")  # the run with a right response
        case "export" if options.version:
            here.update(version=VERSION)
        case "runs":
            here.update(root=str(root))
        case _:
            pass
    names = here.get("run", ())
    if isinstance(names, str):
        here.update(run=names if (root / "runs" / names).exists() else "first")
    elif names:
        here.update(run=["first", "live"][: len(names)])


@pytest.mark.parametrize(
    "block",
    [
        "```sh\nrm -r tba-runs\n```",
        "    tba shrink RUN\n",
        "```\ntba report RUN --colour\n```",
        "```sh\nmake coffee\n```",
    ],
)
def test_a_command_that_is_neither_run_nor_excused_fails(block: str, root: Path):
    with pytest.raises((AssertionError, SystemExit)):
        for command in commands(f"# A page\n\n{block}\n"):
            run(command.text, root)


def test_commands_are_found_wherever_they_stand():
    page = """# A page

```
$ tba check RUN
all is well
$ tba sql RUN "select 1,
               2"
1 2
```

    tba stop RUN        what it's for
    tba run quickstart \\
      --steps 10   # so many

```sql
from steps
```

```
tba/    a folder
```
"""
    assert [it.text for it in commands(page)] == [
        "tba check RUN", 'tba sql RUN "select 1, 2"', "tba stop RUN", "tba run quickstart --steps 10", "from steps",
    ]  # fmt: skip


def test_every_excuse_is_needed():
    asked = [it.text for page in PAGES for it in commands(page.read_text())]
    assert [it.begins for it in (*EXCUSES, *CODE) if not any(re.match(it.begins, text) for text in asked)] == []
