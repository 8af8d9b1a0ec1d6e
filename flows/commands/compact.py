"""`tba compact`: merge the shards of a run into a few objects, and report the result as text or as JSON."""

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict

from flows.commands.arguments import RUN_HELP, explain, open_run
from flows.planning.run_summary import has_all
from flows.progress import bar
from storage.local_files.scratch import remove_left
from storage.maintenance.compactor import Compacted, Progress, compact
from storage.runs.run import Run, run_urls
from tba.config import parse
from tba.errors import TBAError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "Merges the shards that were admitted before the oldest checkpoint that the run keeps. Queries of long runs\n"
        "become faster; nothing else changes. It is safe while the run is running, and can be repeated at any time.\n"
        "With --drop-payloads, trajectories that no later step can draw lose their tokens and log-probabilities.\n"
        "Then only steps after that checkpoint can be audited and forked. Existing forks keep what they need.",
        "example:\n  tba compact first",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--drop-payloads", action="store_true", help="remove tokens that no later step can draw")
    parser.add_argument("--json", action="store_true", help="what was done as one object")


def command(options: argparse.Namespace) -> int:
    return show(open_run(options.run), drop_payloads=options.drop_payloads, as_json=options.json)


def compact_run(run: Run, *, drop_payloads: bool = False, progress: Progress | None = None) -> Compacted:
    """Compact a run according to its settings. The number of checkpoints that the run keeps decides which shards are
    merged. With `drop_payloads`, the settings of sampling decide which trajectories can still be drawn and so keep
    their tokens. Also remove what killed trainers of this machine have left in a run on a local disk."""
    config = parse(run.config)
    if run.folder:
        remove_left(run.folder)
    return compact(
        run,
        keep_checkpoints=config.sync.keep_checkpoints,
        drop_beyond=config.sampling.eligibility if drop_payloads else None,
        progress=progress,
    )


def compact_all(
    root: str, *, drop_payloads: bool, tell: Callable[[str], None], warn: Callable[[str], None]
) -> list[str]:
    """Compact each run under a root. With `drop_payloads`, drop the payloads of finished runs only. Return the URLs of
    the runs that could not be compacted; `warn` has been called with the reason for each."""
    failed: list[str] = []
    for url in run_urls(root):
        try:
            run = Run.open(url)
            drops = drop_payloads and has_all(run)
            tell(describe(compact_run(run, drop_payloads=drops), drop_payloads=drops))
        except TBAError as error:
            warn(f"{url}: {type(error).__name__}: {error}")
            failed.append(url)
    return failed


def show(run: Run, *, drop_payloads: bool, as_json: bool) -> int:
    with bar("compacting") as tell:
        done = compact_run(run, drop_payloads=drop_payloads, progress=tell)
    if as_json:
        print(json.dumps({**asdict(done), "upto": str(done.upto) if done.upto else None}, indent=1))
    else:
        print(describe(done, drop_payloads=drop_payloads))
    return 0


def describe(done: Compacted, *, drop_payloads: bool = False) -> str:
    if done.upto is None:
        return f"{done.run} has no checkpoint of its own yet: only shards admitted before a checkpoint can be compacted"
    lines = [
        f"{done.shards:,} shards of {done.run}, admitted up to sync {done.upto.number}, lie in compactions; "
        f"{len(done.written)} written now ({done.bytes_written / 1e6:,.1f} MB), {done.removed:,} objects removed"
    ]
    if done.payloads_given_up:
        lines.append(f"the tokens of {done.payloads_given_up:,} trajectories were given up: retention {done.retention}")
    elif drop_payloads:
        drawers = f"this run or its forks ({', '.join(done.forks)})" if done.forks else "this run"
        lines.append(
            f"no tokens were given up: all trajectories with tokens can still be drawn by {drawers}, or the others "
            "are too few to rewrite the objects that hold them"
        )
    lines += [f"left unchanged: {key}: {why}" for key, why in done.left.items()]
    return "\n".join(lines)
