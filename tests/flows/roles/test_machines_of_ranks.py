"""Ranks of a trainer may be on different machines. The code that they run names no address that only one machine has,
and hands no path from one rank to another. This reads the source, so it also finds what no test runs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("flows/roles", "tba/distributed", "tba/train")
ONE_MACHINE = re.compile(r"127\.|localhost|::1$|lo$|0\.0\.0\.0|file://|unix://|/(tmp|dev|run|var|proc|home)\b")
LOOPBACK = ("LOOPBACK", "is_loopback", "AF_UNIX")
A_PATH = ("Path", "TemporaryDirectory", "scratch_folder", "mkdtemp", "gettempdir", "getcwd", "__file__")
TO_OTHERS = ("together", "send_order", "answer", "announce", "Rendezvous", "Group", "set")
"""Functions whose arguments reach other ranks: orders, answers, the record in storage, and the store of torch."""

EXCEPTIONS = {
    "flows/roles/meeting.py:local_world": "rank 0 starts all other ranks on its own machine",
    "flows/roles/leading_rank.py:_begin": "the order carries the names and the content of files, not their folder",
    "tba/distributed/process_group.py:open_meeting": "loopback if all ranks are on this machine",
    "tba/distributed/process_group.py:_listen": "refuses loopback if other machines have to reach it",
    "tba/distributed/process_group.py:_choose_interface": "loopback if all ranks are on this machine, else refused",
    "tba/distributed/world.py:": "the constant for ranks that are all on this machine",
    "tba/distributed/world.py:address_for_others": "refuses loopback",
}


def tied_to_a_machine(source: str) -> set[str]:
    """Return the functions of a module that name an address of one machine, or hand a path to other ranks. What is
    outside of a function has an empty name."""
    return {name for name, body in _functions(ast.parse(source)) if _names_a_machine(body) or _hands_over_a_path(body)}


def _functions(module: ast.Module) -> Iterator[tuple[str, list[ast.AST]]]:
    """Yield each outermost function of a module with all its nodes, and the nodes outside of functions."""
    outside: list[ast.AST] = []
    rest: list[ast.AST] = [module]
    while rest:
        node = rest.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, [*ast.walk(node)]
        else:
            outside.append(node)
            rest += ast.iter_child_nodes(node)
    yield "", outside


def _names_a_machine(nodes: list[ast.AST]) -> bool:
    texts = {id(it.value) for it in nodes if isinstance(it, ast.Expr)}  # docstrings
    found = [it.value for it in nodes if isinstance(it, ast.Constant) and id(it) not in texts]
    return any(isinstance(it, str) and ONE_MACHINE.match(it) for it in found) or bool(_names(nodes) & {*LOOPBACK})


def _hands_over_a_path(nodes: list[ast.AST]) -> bool:
    paths = {*A_PATH}
    for it in nodes:
        if isinstance(it, ast.arg) and it.annotation and "Path" in ast.unparse(it.annotation):
            paths.add(it.arg)
        if isinstance(it, ast.withitem) and it.optional_vars and _names(ast.walk(it.context_expr)) & {*A_PATH}:
            paths.add(ast.unparse(it.optional_vars))
        if isinstance(it, ast.Assign) and _names(ast.walk(it.value)) & {*A_PATH}:
            paths |= {ast.unparse(target) for target in it.targets}
    calls = [it for it in nodes if isinstance(it, ast.Call) and _last_name(it.func) in TO_OTHERS]
    handed = [value for it in calls for value in (*it.args, *(keyword.value for keyword in it.keywords))]
    return any(_names(ast.walk(it)) & paths for it in handed)


def _names(nodes: "Iterator[ast.AST] | list[ast.AST]") -> set[str]:
    return {_last_name(it) for it in nodes}


def _last_name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def test_no_code_of_ranks_is_tied_to_one_machine():
    found = {
        f"{path.relative_to(ROOT)}:{name}"
        for folder in FOLDERS
        for path in (ROOT / folder).glob("*.py")
        for name in tied_to_a_machine(path.read_text())
    }
    assert found == EXCEPTIONS.keys()


@pytest.mark.parametrize(
    "line",
    [
        'reach("localhost", 1)',
        'World(address="127.0.0.1")',
        'os.environ["GLOO_SOCKET_IFNAME"] = "lo"',
        'join("file:///srv/meeting")',
        "listen(LOOPBACK)",
        'followers.together("load", load, str(folder))',
        'send_order("load", folder.as_posix())',
        "answer({'stored': str(Path(name))})",
        'self.store.set("checkpoint", str(folder / "x"))',
        "with TemporaryDirectory() as made: answer(made)",
        "there = mkdtemp(); answer(there)",
    ],
)
def test_the_reader_of_the_source_finds_what_is_tied_to_one_machine(line: str):
    assert tied_to_a_machine(f"def work(folder: Path):\n    {line}\n") == {"work"}


def test_the_reader_of_the_source_leaves_the_rest_alone():
    source = '''
def work(folder: Path):
    """Never use localhost or /tmp."""
    with TemporaryDirectory() as made:
        save(made)
        answer({"sha256": digest})
    followers.together("learn", learn, [step, values], numbers)
    return made
'''
    assert tied_to_a_machine(source) == set()
