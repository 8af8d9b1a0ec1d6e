"""The prompt of `tba sql`, in a real terminal."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from flows.commands.sql_prompt import Completer
from storage.log.trajectories import Trajectories
from storage.runs.run import Run
from tests.support.builders import make_shard
from tests.support.flows.terminal import Terminal
from tests.support.storage.synthetic import PROMPTS, STEPS, make_live_run, make_run

READY = "tba> "
CTRL_C, CTRL_D, TAB, UP = "\x03", "\x04", "\t", "\x1b[A"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return make_run(str(tmp_path_factory.mktemp("root")))


@pytest.fixture
def prompt(tmp_path: Path) -> Iterator[Callable[[Run], Terminal]]:
    """Return a function that opens a prompt. All prompts of a test share one history."""
    opened: list[Terminal] = []

    def open_prompt(run: Run) -> Terminal:
        command = [sys.executable, "-m", "flows.cli", "sql", run.url]
        opened.append(Terminal(command, environment={"TBA_CACHE": str(tmp_path / "cache")}))
        opened[-1].read(READY)
        return opened[-1]

    yield open_prompt
    for terminal in opened:
        terminal.close()


def test_a_query_of_several_lines_is_answered_and_ctrl_d_leaves(finished: Run, prompt: Callable[[Run], Terminal]):
    terminal = prompt(finished)
    terminal.type("select count(*) as steps\n", until="...> ")
    assert f"│     {STEPS} │" in terminal.type("from steps;\n", until=READY)
    terminal.type(CTRL_D, until="\n")
    assert terminal.end() == 0


def test_errors_are_told_and_the_prompt_goes_on(finished: Run, prompt: Callable[[Run], Terminal]):
    terminal = prompt(finished)
    assert 'error: Binder Error: Referenced column "nonsense"' in terminal.type("select nonsense;\n", until=READY)
    assert "error: .nonsense is no command" in terminal.type(".nonsense\n", until=READY)
    assert "disabled by configuration" in terminal.type("from '/etc/passwd.csv';\n", until=READY)
    assert "42" in terminal.type("select 6 * 7 as answer;\n", until=READY)


def test_tab_completes_views_macros_columns_and_commands(finished: Run, prompt: Callable[[Run], Terminal]):
    terminal = prompt(finished)
    terminal.type("select weights_s" + TAB, until="weights_sha256")
    terminal.type(" from steps_" + TAB, until="steps_all")
    terminal.type(" join unsol" + TAB, until="unsolved(")
    terminal.press(CTRL_C, until=READY)
    terminal.type(".ref" + TAB, until="refresh")


def test_ctrl_c_forgets_what_was_typed(finished: Run, prompt: Callable[[Run], Terminal]):
    terminal = prompt(finished)
    terminal.type("select nonsense\n", until="...> ")
    terminal.type("from nowhere", until="nowhere")
    terminal.press(CTRL_C, until=READY)
    assert "nowhere" not in terminal.type("from steps limit 0;\n", until="rows")


def test_ctrl_c_stops_a_query_and_not_the_prompt(finished: Run, prompt: Callable[[Run], Terminal]):
    terminal = prompt(finished)
    told = ""
    while "interrupted" not in told:  # Ctrl-C before the query has begun only clears the line
        terminal.type("select sum(a.i * b.i) from range(10000000) a(i), range(10000000) b(i);\n", until="\n")
        told = terminal.press(CTRL_C, until=READY)
    terminal.type("select count(*) as steps from steps;\n", until=f"│     {STEPS} │")


def test_ctrl_c_stops_a_query_that_heeds_no_interrupt_too(finished: Run, prompt: Callable[[Run], Terminal]):
    terminal = prompt(finished)
    told = ""
    while "is gone with the query's process" not in told:  # Ctrl-C may come before the query has begun
        terminal.type("select levenshtein(repeat('a', 400000), repeat('b', 400000));\n", until="\n")
        told = terminal.press(CTRL_C, until=READY)
    assert "interrupted" in told
    terminal.type("select count(*) as steps from steps;\n", until=f"│     {STEPS} │")


def test_a_query_that_ends_its_process_does_not_end_the_prompt(finished: Run, prompt: Callable[[Run], Terminal]):
    terminal = prompt(finished)
    assert "error: the query ended the process" in terminal.type("from system.pandas_scan(null);\n", until=READY)
    assert "42" in terminal.type("select 6 * 7 as answer;\n", until=READY)


def test_the_next_prompt_has_each_earlier_query_as_one_line(
    finished: Run, prompt: Callable[[Run], Terminal], tmp_path: Path
):
    before = prompt(finished)
    before.type("select max(step)\n", until="...> ")
    before.type("  from steps;\n", until=READY)
    before.process.kill()  # the history has each query as soon as it is asked
    assert (tmp_path / "cache" / "prompt" / "history").stat().st_mode & 0o077 == 0
    prompt(finished).type(UP, until="select max(step) from steps;")


def test_a_table_that_a_query_makes_exists_for_later_queries_until_refresh(
    prompt: Callable[[Run], Terminal], tmp_path: Path
):
    run = make_live_run(str(tmp_path))
    terminal = prompt(run)
    terminal.type("create temp table before as select count(*) as n from trajectories;\n", until=READY)
    Trajectories(run).append(0, 99, make_shard({PROMPTS[0]: [1.0]}, round=99))
    unchanged = "select n = (select count(*) from trajectories) as unchanged from before;\n"
    assert "true" in terminal.type(unchanged, until=READY)
    assert "4 steps, 49 trajectories" in terminal.type(".refresh\n", until=READY)
    assert "before does not exist" in terminal.type(unchanged, until=READY)
    assert "49" in terminal.type("select count(*) from trajectories;\n", until=READY)


def test_help_lists_and_explains(finished: Run, prompt: Callable[[Run], Terminal]):
    terminal = prompt(finished)
    listed = terminal.type(".help\n", until=READY)
    assert "trajectories " in listed
    assert "unsolved(min_tries, solved_at) " in listed
    assert "share of groups whose rewards are all equal" in terminal.type(".help steps\n", until=READY)
    assert "no view and no macro" in terminal.type(".help nonsense\n", until=READY)


@pytest.mark.parametrize(
    ("line", "word", "candidates"),
    [
        ("select st", "st", ["step", "steps", "struct_pack("]),
        ("SELECT ST", "ST", ["STEP", "STEPS", "STRUCT_PACK("]),
        (".help st", "st", ["step", "steps", "struct_pack"]),
        (".he", "he", ["help"]),
        ("select x.ste", "ste", ["step", "steps"]),
        ("select nothing", "nothing", []),
    ],
)
def test_completion_knows_names_in_the_case_they_are_typed_in(line: str, word: str, candidates: list[str]):
    assert Completer(["steps", "step", "struct_pack(", "help"]).candidates(line, word) == candidates
