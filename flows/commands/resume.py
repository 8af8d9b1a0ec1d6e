"""`tba resume`: continue an interrupted run."""

import argparse

from flows.commands.arguments import DONE, RUN_HELP, explain, open_run
from flows.commands.run import supervise
from tba.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "The trainer continues from its newest intact checkpoint and repeats the steps since then on the same data.\n"
        "Roles that are still alive are adopted. Nothing that was stored is lost or counted twice. The run keeps its\n"
        "settings; `tba fork` continues with others.",
        "example:\n  tba resume first",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--set", nargs="*", dest="changes", help=argparse.SUPPRESS)  # refused below


def command(options: argparse.Namespace) -> int:
    from flows.pages.markdown import last_scores, where_next
    from flows.planning import create, run_summary
    from tba.config import parse_known

    if options.changes is not None:
        raise ConfigError(
            f"--set: a run keeps its settings; `tba fork {options.run} --step N --set …` goes on from a step with "
            "others"
        )
    run = open_run(options.run)
    if run_summary.has_all(run):
        replays = run.parent is not None and run.parent.replays is not None
        last = parse_known(run.config).training.steps
        further = "" if replays else f"; `tba fork {run.url} --step {last} --set training.steps=…` goes further"
        print(f"run {run.name} has finished already{further}\n{last_scores(run)}\n\n{where_next(run)}")
        return DONE
    run, _ = create.resume(run.url)
    return supervise(run)
