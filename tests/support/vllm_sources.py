"""Read vLLM's source files without importing vLLM, which takes long and needs a device for some modules."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from tests.support.pages import ROOT


@contextmanager
def needed_by(ours: str) -> Iterator[None]:
    """Name our files in the message of every assertion that fails."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{ours} needs a part of vLLM that has changed: {error}") from error


@cache
def module(name: str) -> ast.Module:
    """Return the syntax tree of a module: of vLLM if its path begins with `vllm/`, otherwise of this repository."""
    path = ROOT / name
    if name.startswith("vllm/"):
        spec = find_spec("vllm")
        assert spec and spec.origin, "vLLM is not installed"
        path = Path(spec.origin).parents[1] / name
    assert path.exists(), f"there is no {name} any more"
    return ast.parse(path.read_text())


def find(name: str, qualified: str) -> ast.AST:
    """Return the class, function or assignment with a qualified name such as `LLMEngine.step`."""
    place: ast.AST = module(name)
    for part in qualified.split("."):
        inside = [node for node in ast.walk(place) if part in _names(node)]
        assert inside, f"{name} has no {qualified} any more"
        place = inside[-1]  # a function that is overloaded is defined last
    return place


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [ast.unparse(target) for target in targets]


def parameters(name: str, qualified: str) -> list[str]:
    """Return the names of a function's parameters, without `self` and `cls`."""
    function = find(name, qualified)
    assert isinstance(function, ast.FunctionDef), f"{qualified} of {name} is no function"
    named = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return [it.arg for it in named if it.arg not in ("self", "cls")]


def fields(name: str, qualified: str) -> set[str]:
    """Return the names of the annotated fields of a class."""
    kind = find(name, qualified)
    assert isinstance(kind, ast.ClassDef)
    return {ast.unparse(it.target) for it in kind.body if isinstance(it, ast.AnnAssign)}


def assigned(name: str, qualified: str) -> set[str]:
    """Return the names of all attributes that a class or function assigns, such as `x` of `self.x = 1`."""
    nodes = [node for node in ast.walk(find(name, qualified)) if isinstance(node, ast.Attribute)]
    return {node.attr for node in nodes if isinstance(node.ctx, ast.Store)}


def abstract_methods(name: str, qualified: str) -> set[str]:
    kind = find(name, qualified)
    assert isinstance(kind, ast.ClassDef)
    functions = [it for it in kind.body if isinstance(it, ast.FunctionDef)]
    return {it.name for it in functions if any("abstractmethod" in ast.unparse(mark) for mark in it.decorator_list)}


def methods(name: str, qualified: str) -> set[str]:
    kind = find(name, qualified)
    assert isinstance(kind, ast.ClassDef)
    return {it.name for it in kind.body if isinstance(it, ast.FunctionDef)}


def keywords(name: str, called: str) -> set[str]:
    """Return the names of the arguments with which a module calls something."""
    calls = [node for node in ast.walk(module(name)) if isinstance(node, ast.Call) and ast.unparse(node.func) == called]
    assert calls, f"{name} calls no {called} any more"
    return {it.arg for call in calls for it in call.keywords if it.arg}


def keys(name: str, function: str) -> set[str]:
    """Return the texts that are keys of dictionaries or subscripts in a function."""
    place = find(name, function)
    of_dicts = [key for node in ast.walk(place) if isinstance(node, ast.Dict) for key in node.keys]
    of_subscripts = [node.slice for node in ast.walk(place) if isinstance(node, ast.Subscript)]
    constants = [it.value for it in (*of_dicts, *of_subscripts) if isinstance(it, ast.Constant)]
    return {it for it in constants if isinstance(it, str)}


def dtypes(node: ast.AST | None) -> set[str]:
    """Return the names of the number formats of torch that a piece of code mentions."""
    assert node is not None
    names = {ast.unparse(it) for it in ast.walk(node) if isinstance(it, ast.Attribute)}
    return {
        "float16" if it == "torch.half" else it[6:] for it in names if it.startswith("torch.") and it != "torch.dtype"
    }


def asserted(name: str, function: str, subject: str) -> Iterator[set[str]]:
    """Yield the number formats that each assertion `assert <subject> in [...]` of a function allows."""
    for node in ast.walk(find(name, function)):
        if isinstance(node, ast.Assert) and ast.unparse(node.test).startswith(f"{subject} in ["):
            yield dtypes(node.test)
