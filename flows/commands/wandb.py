"""`tba wandb`: make a new Weights & Biases run of everything in a run's log. By default it is written offline, and
`wandb sync` sends it; `--online` sends it at once."""

import argparse

from flows.commands.arguments import DONE, RUN_HELP, explain, open_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "Use this for a run without W&B, or whose W&B run was lost. The new W&B run contains each step and each\n"
        "evaluated version once. It is written offline, and `wandb sync` sends it, unless --online is given.",
        "example:\n  tba wandb first --project experiments",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--project", help="W&B project (default: metrics.wandb_project of the run)")
    parser.add_argument("--online", action="store_true", help="send the W&B run at once")


def command(options: argparse.Namespace) -> int:
    from storage.metrics.wandb_writer import rebuild

    run = open_run(options.run)
    project = options.project or run.config.get("metrics", {}).get("wandb_project", "tba")
    folder, steps, versions = rebuild(run, project, "online" if options.online else "offline")
    print(f"{steps} steps and the scores of {versions} versions")
    print(folder if options.online else f"wandb sync {folder}")
    return DONE
