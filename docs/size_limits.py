"""Print the largest modules, classes, functions and folders, and find circular imports.

    python -m docs.size_limits

`make check` runs it. It fails if anything is above its limit, unless EXCEPTIONS names it.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
PACKAGES = ("tba", "storage", "flows", "benchmarks")
MEASURED = (*PACKAGES, "tests")
LEFT_OUT = ROOT / "tests" / "data"  # stored runs
LIMITS = {"module": 400, "class": 200, "function": 60, "folder": 15}  # lines; files of a folder, of any kind
SHOWN = 5  # how many of each kind are printed
EXCEPTIONS = {
    "benchmarks/results": "one file per measurement",
    "flows/commands": "one file per command",
    "tba/tasks": "one file per task",
}


def main() -> int:
    sizes = [*_sizes()]
    for kind, limit in LIMITS.items():
        largest = sorted((size, name) for found, name, size in sizes if found == kind)[::-1]
        shown = ", ".join(f"{name} {size}" for size, name in largest[:SHOWN])
        print(f"{kind}: at most {limit}; the largest are {shown}")
    above = [f"{name} has {size}" for kind, name, size in sizes if size > LIMITS[kind] and name not in EXCEPTIONS]
    circle = find_circle()
    print("circles of imports: " + (" -> ".join(circle) if circle else "none"))
    for line in above:
        print(f"above the limit: {line}", file=sys.stderr)
    return 1 if above or circle else 0


def _sizes() -> Iterator[tuple[str, str, int]]:
    """Yield the kind, name and size of everything that has a limit."""
    folders = Counter[str]()
    for package in MEASURED:
        for path in sorted((ROOT / package).rglob("*")):
            if path.is_dir() or "__pycache__" in path.parts or LEFT_OUT in path.parents:
                continue
            name = str(path.relative_to(ROOT))
            folders[str(Path(name).parent)] += path.name != "__init__.py"
            if path.suffix != ".py":
                continue
            text = path.read_text(encoding="utf-8")
            yield "module", name, len(text.splitlines())
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.ClassDef):
                    yield "class", f"{name}:{node.name}", _lines(node)
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield "function", f"{name}:{node.name}", _lines(node)
    yield from (("folder", name, size) for name, size in folders.items())


def _lines(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


def find_circle() -> list[str]:
    """Return modules that import each other in a circle, or an empty list. Imports only for types do not count."""
    graph = grimp.build_graph(*PACKAGES, exclude_type_checking_imports=True)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return error.args[1]
    return []


if __name__ == "__main__":
    sys.exit(main())
