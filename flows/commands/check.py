"""`tba check`: print what `storage.maintenance.check` finds, as a table or as JSON."""

import argparse
import json
from dataclasses import asdict

from flows.commands.arguments import RUN_HELP, explain, open_run
from flows.progress import bar
from storage.maintenance.check import Findings, check
from storage.runs.run import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "Compares every record with every object: checksums, gaps, duplicates, draws without a trajectory, unfinished\n"
        "writes. Changes nothing. Exits with 0 if all is well and with 1 if something is wrong.",
        "example:\n  tba check first",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--json", action="store_true", help="the findings as one object instead of a table")


def command(options: argparse.Namespace) -> int:
    return show(open_run(options.run), as_json=options.json)


def show(run: Run, *, as_json: bool = False) -> int:
    with bar("checking objects") as tell:
        findings = check(run, progress=tell)
    if as_json:
        print(json.dumps({"ok": findings.ok, **asdict(findings)}, indent=1))
    else:
        _print(findings)
    return 0 if findings.ok else 1


def _print(findings: Findings) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    counts = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    counts.add_column(f"checked in {findings.run}")
    counts.add_column("", justify="right")
    for kind, number in findings.checked.items():
        counts.add_row(kind, f"{number:,}")
    console.print(counts)
    for note in findings.notes:
        console.print(f"note: {escape(note)}", soft_wrap=True)
    for it in findings.problems:
        console.print(f"[red]wrong:[/red] {escape(it.key)}: {escape(it.problem)}", soft_wrap=True)
    number = len(findings.problems)
    console.print("nothing is missing or doubled" if findings.ok else f"{number} problem{'s' * (number != 1)}")
