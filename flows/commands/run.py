"""`tba run`: train on a task until the run has finished."""

import argparse
import sys
from typing import TYPE_CHECKING

from flows.commands.arguments import DONE, add_external_trainer, add_gpus, add_set, explain, read_changes

if TYPE_CHECKING:
    from storage.runs.run import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "Starts the searchers, the trainer and the evaluator on this machine and supervises them. Everything they\n"
        "produce is stored under ROOT/runs/NAME. Ctrl-C stops them in an orderly way; `tba resume` continues.",
        "examples:\n"
        "  tba run quickstart\n"
        "  tba run quickstart --name first --steps 80 --set training.learning_rate=1e-4\n"
        "  tba run gsm8k --root s3://bucket/experiments --searchers 3 --dry-run",
    )
    parser.add_argument(
        "task",
        metavar="TASK",
        help="quickstart, gsm8k, math, tldr, redteam, redteam-laptop, reasoning-gym, instructions, verifiers, or a "
        "task of your own (docs/tasks.md)",
    )
    add_set(parser)
    parser.add_argument("--root", help="folder or s3:// URL for runs (default: $TBA_ROOT, else tba-runs)")
    parser.add_argument("--name", help="name of the run (default: the task and the time)")
    parser.add_argument("--steps", type=int, help="number of gradient steps")
    parser.add_argument("--searchers", type=int, help="number of searchers")
    parser.add_argument("--seed", type=int, help="seed of everything random")
    add_gpus(parser, "change settings so that the run fits by its plan of memory; settings of --set stay")
    add_external_trainer(parser)
    parser.add_argument("--dry-run", action="store_true", help="show what the settings mean and start nothing")


def command(options: argparse.Namespace) -> int:
    from flows.planning import create, describe, fit_to_gpus, resolve
    from flows.planning.plan_table import assigned

    changes, flat = read_changes(options), {name: getattr(options, name) for name in resolve.FLAT}
    elsewhere = options.dry_run and options.gpus not in (None, "here")
    trains = not options.external_trainer
    config = resolve.resolve(options.task, changes, uses_gpus_here=not elsewhere, trains_here=trains, **flat)
    keep = resolve.changed_settings(changes, flat)
    gpus, fitted = fit_to_gpus.fit(config, options.gpus, keep, runs_here=not options.dry_run)
    if fitted:
        config = config.replace(fitted)
        print(f"to fit on {gpus}: {assigned(fitted)}", file=sys.stderr)
    elif trains and (warning := fit_to_gpus.warning(config, gpus)):
        print(f"warning: {warning}", file=sys.stderr)
    if options.dry_run:
        create.refuse_existing(options.root, options.name)
        print(describe.describe(config, gpus))
        return DONE
    for warning in fit_to_gpus.warnings_here(config):
        print(f"warning: {warning}", file=sys.stderr)
    run = create.start(config, options.root, options.name, created_by="tba run", task=options.task)
    return supervise(run, external_trainer=options.external_trainer)


def supervise(run: "Run", *, external_trainer: bool = False) -> int:
    """Keep a run's roles alive on this machine until the run has finished. Then print the last scores, and where to
    look next. With `external_trainer`, something else starts the trainer."""
    from flows.pages.markdown import last_scores, where_next
    from flows.supervision.terminal import run_here

    print(f"run {run.name} at {run.url}", file=sys.stderr)
    run_here(run, external_trainer=external_trainer)
    print(f"{last_scores(run)}\n\n{where_next(run)}")
    return DONE
