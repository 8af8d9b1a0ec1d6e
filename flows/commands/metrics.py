"""`tba metrics`: export the metrics of runs to Prometheus or to a collector of OpenTelemetry."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from flows.commands.arguments import DONE, FOUND_WRONG, explain, parse_seconds
from tba.errors import ConfigError

if TYPE_CHECKING:
    from flows.metrics.watched import Watched

DEFAULT = "127.0.0.1", 9469
DEADLINE = 8.0  # seconds; Prometheus gives up after 10
PUSH_EVERY = 15.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "Reads only storage, so one process on any machine serves all runs under a root, and roles need no agent. The\n"
        "metrics are at http://127.0.0.1:9469/metrics. Whoever can connect can read them: with another address in\n"
        "--listen, set a token in the environment variable TBA_METRICS_TOKEN.",
        "examples:\n  tba metrics s3://bucket/experiments\n  tba metrics first --once\n"
        "  tba metrics tba-runs --otlp http://collector:4318/v1/metrics",
    )
    parser.add_argument(
        "places",
        metavar="ROOT|RUN",
        nargs="+",
        help="a folder or URL with runs, or a run by its name under the default root, its path or its URL",
    )
    parser.add_argument(
        "--listen",
        type=_address,
        metavar="HOST:PORT",
        help="address to listen on (default: 127.0.0.1:9469, or none with --otlp); port 0 takes any free port",
    )
    parser.add_argument("--once", action="store_true", help="print the metrics once and end")
    parser.add_argument("--otlp", metavar="URL", help="send the metrics to this address of an OpenTelemetry collector")
    parser.add_argument(
        "--every",
        type=parse_seconds,
        default=PUSH_EVERY,
        metavar="SECONDS",
        help="seconds between two sends with --otlp (default: %(default)s)",
    )
    parser.add_argument(
        "--deadline",
        type=parse_seconds,
        default=DEADLINE,
        metavar="SECONDS",
        help="longest time of an answer (default: %(default)s); a run that was not read by then is left out of it",
    )


def command(options: argparse.Namespace) -> int:
    watched = _watched(options.places)
    if options.once:
        return _print_once(watched, options.deadline)
    from flows.http_server import in_url, is_loopback, listen
    from flows.metrics import server

    if options.otlp:
        from flows.metrics import otlp

        sender = otlp.Sender(options.otlp, lambda: watched.scrape(deadline=options.deadline))
        if options.listen is None:
            print(f"sends to {options.otlp} every {options.every:g} s   (Ctrl-C ends it)", flush=True)
            sender.run(options.every)
            return DONE
        sender.start(options.every)
    host, port = options.listen or DEFAULT
    with listen(host, port, host_option="--listen", port_option="--listen") as listening:
        host, port = listening.getsockname()[:2]
        print(f"metrics at http://{in_url(host)}:{port}/metrics   (Ctrl-C ends it)", flush=True)
        if not is_loopback(listening) and not server.has_token():
            print(
                f"warning: whoever reaches this address can read the metrics; {server.TOKEN} sets a token",
                file=sys.stderr,
            )
        server.serve(listening, lambda: watched.scrape(deadline=options.deadline))
    return DONE


def _print_once(watched: "Watched", deadline: float) -> int:
    from flows.metrics.exposition import encode

    samples = watched.scrape(deadline=deadline)
    sys.stdout.write(encode(samples)[0].decode())
    ups = [value for metric, _, value in samples if metric.name in ("tba_up", "tba_run_up")]
    return DONE if all(ups) else FOUND_WRONG


def _watched(places: list[str]) -> "Watched":
    from flows.metrics.watched import Watched

    return Watched([_url(place) for place in places])


def _url(place: str) -> str:
    """Return the URL of a root or a run. Nothing remote is asked: what cannot be reached now may be reached later. A
    name under a remote root may be wrong, so a folder on this machine comes first."""
    from storage.runs.run import resolve

    url = resolve(place)
    if "://" not in url and Path(url).is_dir():
        return url
    if "://" not in place and Path(place).is_dir():
        return place
    if "://" not in url:
        raise ConfigError(f"ROOT|RUN: there is neither a folder nor a run {place!r}")
    return url


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not (host and port.isascii() and port.isdigit() and int(port) < 65536):
        raise argparse.ArgumentTypeError(f"HOST:PORT with a port from 0 to 65535, got {text!r}")
    return host.removeprefix("[").removesuffix("]"), int(port)
