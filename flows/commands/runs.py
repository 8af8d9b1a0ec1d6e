"""`tba runs`: list the runs under a root and their states, read from their storage alone."""

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from flows.commands.arguments import explain
from flows.planning.run_summary import Summary, summaries
from storage import layout
from storage.runs.run import default_root
from tba.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(parser, "example:\n  tba runs s3://bucket/experiments")
    parser.add_argument("root", metavar="ROOT", nargs="?", help="folder or URL (default: $TBA_ROOT, else tba-runs)")
    parser.add_argument("--json", action="store_true", help="a list of objects instead of a table")


def command(options: argparse.Namespace) -> int:
    return show(options.root, as_json=options.json)


def show(root: str | None, *, as_json: bool = False) -> int:
    if root and "://" not in root and not Path(root).is_dir():
        raise ConfigError(f"ROOT: there is no folder {root!r}")
    root = root or default_root()
    runs, warnings = summaries(root)
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)
    if as_json:
        print(json.dumps([asdict(summary) for summary in runs], indent=1))
    elif not runs:
        above, _, last = root.rstrip("/").rpartition("/")
        instead = f"runs lie in ROOT/{layout.RUNS}: `tba runs {above or '.'}`" if f"{last}/" == layout.RUNS else ""
        print(f"no runs under {root}; {instead or '`tba run quickstart` makes one'}")
    else:
        _print_table(runs)
    return 0


def _print_table(summaries: list[Summary]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))  # fits into 80 columns
    longest = max(len(it.run) for it in summaries)
    table.add_column("run", no_wrap=True, min_width=longest)  # never shortened: the other commands need the name
    columns = {
        "task": [it.task for it in summaries],
        "fork of": [it.parent for it in summaries],
        "state": [it.state for it in summaries],
        "step": [_blank(it.step) for it in summaries],
        "version": [_blank(it.version) for it in summaries],
        "score": ["" if it.score is None else f"{it.score:.3f}" for it in summaries],
        "searchers": [str(it.searchers or "") for it in summaries],
    }
    shown = {name: cells for name, cells in columns.items() if name not in ("fork of", "searchers") or any(cells)}
    for name in shown:
        table.add_column(
            name, justify="right" if name in ("step", "version", "score", "searchers") else "left", overflow="fold"
        )
    for it, cells in zip(summaries, zip(*shown.values(), strict=True), strict=True):
        table.add_row(it.run, *cells)
    console = Console()
    if not console.is_terminal:
        console.width = 240  # a file or a pipe can hold long lines
    console.print(table)


def _blank(number: int | None) -> str:
    return "" if number is None else str(number)
