"""`tba export`: export a version as a Hugging Face folder, or the rows of an SQL query as a Parquet dataset."""

import argparse

from flows.commands.arguments import DONE, RUN_HELP, explain, open_run
from tba.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "The files of a version are verified against their checksums. The view `versions` lists the kept versions:\n"
        "  tba sql RUN \"select * from versions where state = 'kept'\"\n"
        "With --query the result is a folder of Parquet with a dataset card, which `datasets.load_dataset` reads. The\n"
        "query can select any rows, such as demonstrations or preference pairs.",
        "examples:\n"
        "  tba export first --version 60 ./policy\n"
        '  tba export first --query "from demonstrations(least_reward := 1)" ./imitate\n'
        '  tba export first --query "from preferences()" ./pairs',
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--version", type=int, metavar="N", help="number of the version; 0 is the start of the run")
    what.add_argument(
        "--query", metavar="SQL", help="SQL query for the rows of a dataset; `from trajectories` takes all"
    )
    parser.add_argument(
        "--attempt", type=int, metavar="A", help="attempt that published the version (default: the newest one)"
    )
    parser.add_argument(
        "--adapter", action="store_true", help="export the adapter alone instead of merging it into its base model"
    )
    parser.add_argument("folder", metavar="DIR", help="a folder that does not exist yet, or is empty")


def command(options: argparse.Namespace) -> int:
    from flows.commands import export_rows, export_version

    run, adapter = open_run(options.run), options.adapter
    if options.query is None:
        print(export_version.export(run, options.version, options.attempt, options.folder, adapter=adapter))
    elif adapter or options.attempt is not None:
        raise ConfigError(f"{'--adapter' if adapter else '--attempt'} does not apply to --query")
    else:
        print(export_rows.export(run, options.query, options.folder))
    return DONE
