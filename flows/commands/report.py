"""`tba report`: write one HTML file with the curves and tables of a run, or with a comparison of several runs."""

import argparse

from flows.commands.arguments import DONE, RUN_HELP, explain, open_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "The file needs no network and nothing beside it.",
        "examples:\n  tba report first --output first.html\n  tba report first firmer",
    )
    parser.add_argument("run", metavar="RUN", nargs="+", help=RUN_HELP)
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="default: report.html in the run's folder, RUN-report.html for a remote run, or comparison.html",
    )


def command(options: argparse.Namespace) -> int:
    from flows.pages.report import comparison, page

    runs = [open_run(name) for name in options.run]
    print(comparison.write(runs, options.output) if len(runs) > 1 else page.write(runs[0], options.output))
    return DONE
