"""`tba browse`: serve the pages of a run to a web browser."""

import argparse

from flows.commands.arguments import RUN_HELP, explain, open_run, parse_seconds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "Find trajectories by a form or by SQL. See each one token by token, with the version that generated it and\n"
        "the steps that drew it; see each step with the trajectories it learned from, explained in words. The pages\n"
        "only read, and only this machine can see them. With another --host, readers need the token that is printed.",
        "example:\n  tba browse first",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--port", type=_port, default=8610, metavar="N", help="port (default: 8610); 0 takes any free port"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, this machine only)"
    )
    parser.add_argument("--token", action="store_true", help="require a token on this machine as well")
    parser.add_argument(
        "--seconds",
        type=parse_seconds,
        default=20.0,
        metavar="S",
        help="maximum time of a query (default: 20)",
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
