"""`tba resume`: continue an interrupted run."""

import argparse
import sys
from typing import TYPE_CHECKING

from flows.commands.arguments import DONE, RUN_HELP, add_external_trainer, add_gpus, explain, open_run
from flows.commands.run import supervise
from tba.errors import ConfigError

if TYPE_CHECKING:
    from storage.runs.run import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "The trainer continues from its newest intact checkpoint and repeats the steps since then on the same data.\n"
        "Roles that are still alive are adopted. Nothing that was stored is lost or counted twice. The run keeps its\n"
        "settings; `tba fork` continues with others.",
        "example:\n  tba resume first",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    add_gpus(parser, "refuse to resume if the run does not fit by its plan of memory")
    add_external_trainer(parser)
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
    if options.gpus or not options.external_trainer:  # the plan counts the trainer among the roles of this machine
        _plan(run, options.gpus)
    run, _ = create.resume(run.url)
    return supervise(run, external_trainer=options.external_trainer)


def _plan(run: "Run", asked: str | None) -> None:
    """Raise ConfigError if the run does not fit on the GPUs `asked`. Without them, print a warning if the run does not
    fit on those of this machine."""
    from flows.commands.fork import kept_by_forks
    from flows.planning import fit_to_gpus

    config = fit_to_gpus.to_resume(run)
    advice = f"a run keeps its settings; `tba fork {run.url} --step N --gpus here` looks for settings that do"
    if asked:
        fit_to_gpus.refuse_too_large(config, asked, kept_by_forks(config))
    elif warning := fit_to_gpus.warning(config, fit_to_gpus.found_here(config), advice):
        print(f"warning: {warning}", file=sys.stderr)
