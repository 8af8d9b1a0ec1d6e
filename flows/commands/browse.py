"""`tba browse`: the pages of a run, served to a browser."""

import argparse

from flows.commands.arguments import RUN_HELP, explain, open_run, parse_seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "Trajectories by form or by SQL, each token by token with the steps that drew it and the version that made\n"
        "it; steps with what they learned from, and in words why. It only reads, and only this machine sees it: with\n"
        "another --host whoever looks needs the token that is printed.",
        "example:\n  tba browse first",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("--port", type=_port, default=8610, metavar="N", help="default: 8610; 0 is any that is free")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1, this machine alone)")
    parser.add_argument("--token", action="store_true", help="ask for a token on this machine, too")
    parser.add_argument(
        "--seconds",
        type=parse_seconds,
        default=20.0,
        metavar="S",
        help="the longest that a query may take (default: 20)",
    )


def command(options: argparse.Namespace) -> int:
    from flows.pages.browse import server

    return server.browse(
        open_run(options.run),
        host=options.host,
        port=options.port,
        with_token=options.token,
        seconds=options.seconds,
    )


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"a number from 0 to 65535, got {text!r}")
    return int(text)
