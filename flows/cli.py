"""The command line `tba`. Each subcommand has a file of its own in flows/commands.

The file of a command is imported only when the command is called, so looking at a run needs neither torch nor Prefect.
"""

import argparse
import logging
import os
import sys
from collections.abc import Collection, Sequence
from importlib import import_module

from flows.commands.arguments import BAD_USAGE, DONE, FOUND_WRONG, INTERRUPTED, CommandParser, Help
from flows.progress import was_interrupted
from tba.errors import ConfigError, DataError, TBAError

# The help lists the commands in this order. The file of a command has the name of the command.
COMMANDS = {
    "run": "Train on a task, until the run has finished.",
    "resume": "Continue an interrupted run.",
    "runs": "List the runs under a root, newest first.",
    "watch": "Follow a run live: progress, scores, age of the data, who waits for whom.",
    "scale": "Change the number of searchers of a running run.",
    "stop": "Stop a run in an orderly way, on whatever machine it runs.",
    "sql": "Query a run with SQL, also while it is running.",
    "report": "Write an HTML file with the curves, tables and samples of a run, or a comparison of several runs.",
    "browse": "Browse the log of a run in a web browser, also while it is running.",
    "metrics": "Export the metrics of runs to Prometheus or OpenTelemetry.",
    "check": "Verify everything a run has stored.",
    "compact": "Merge the shards of a run into a few large objects.",
    "give-up": "Let a run continue without lost shards.",
    "export": "Export a version as a Hugging Face folder, or rows as a dataset.",
    "import": "Import responses from elsewhere into a run, to train on them.",
    "wandb": "Write the metrics and scores of a run from its log to Weights & Biases.",
    "grade": "Score responses in a file with the reward of a task.",
    "audit": "Repeat a past gradient step from storage and compare the result.",
    "fork": "Start a new run from a past step of another.",
}

_ABOUT = """\
Asynchronous RL post-training of language models with trajectory balance.

Searchers generate responses without waiting for training, a trainer learns without waiting for generation, and
between them lies a log of everything on disk or in a bucket that anyone can query with SQL."""


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = build_parser(wanted=arguments).parse_args(arguments)
    logging.getLogger("flows").setLevel(logging.INFO)
    logging.basicConfig(format="%(message)s")  # on standard error: slow commands report their progress there
    try:
        return options.command(options)
    except TBAError as error:
        if options.debug:
            raise
        for line in str(error).splitlines() or [type(error).__name__]:
            print(f"error: {line}", file=sys.stderr)
        return BAD_USAGE if isinstance(error, ConfigError | DataError) else FOUND_WRONG
    except (KeyboardInterrupt, RuntimeError) as error:
        if options.debug or not was_interrupted(error):
            raise
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:  # a full disk, a folder that may not be read
        if options.debug or not error.strerror:
            raise
        print(f"error: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return FOUND_WRONG


def build_parser(wanted: Collection[str] = tuple(COMMANDS)) -> argparse.ArgumentParser:
    """Return the parser of the command line. Only the commands in `wanted` get their arguments, because these are
    defined in the commands' files, which are then imported."""
    parser = argparse.ArgumentParser(prog="tba", description=_ABOUT, formatter_class=Help)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=CommandParser)
    for name, summary in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary, formatter_class=Help, allow_abbrev=False)
        command.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of errors"
        )
        if name in wanted:
            module = import_module(f"flows.commands.{_module(name)}")
            module.add_arguments(command)
            command.set_defaults(command=module.command)
    return parser


def _module(command: str) -> str:
    return "import_" if command == "import" else command.replace("-", "_")


if __name__ == "__main__":
    sys.exit(main())
