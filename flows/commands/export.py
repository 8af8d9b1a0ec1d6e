"""`tba export`: a version as a Hugging Face folder, or rows as a dataset."""

import argparse

from flows.commands.arguments import DONE, RUN_HELP, explain, open_run
from tba.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "A version's files are verified against their checksums. Which versions are kept is in the view `versions`:\n"
        "  tba sql RUN \"select * from versions where state = 'kept'\"\n"
        "With --query it is Parquet with a card, which `datasets.load_dataset` reads: any rows that SQL can say, such\n"
        "as responses to imitate, or pairs to prefer by.",
        "examples:\n"
        "  tba export first --version 60 ./policy\n"
        '  tba export first --query "from demonstrations(least_reward := 1)" ./imitate\n'
        '  tba export first --query "from preferences()" ./pairs',
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--version", type=int, metavar="N", help="number of the version; 0 is the start")
    what.add_argument("--query", metavar="SQL", help="the rows of a dataset; all of it is `from trajectories`")
    parser.add_argument("--attempt", type=int, metavar="A", help="of which attempt (default: the newest that has it)")
    parser.add_argument("--adapter", action="store_true", help="of adapters: as it is, not merged into its base")
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
