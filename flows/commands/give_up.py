"""`tba give-up`: let a run go on without admitted shards that are lost. A retention record says which, and why."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from flows.commands.arguments import RUN_HELP, explain, open_run
from flows.planning.create import refuse_supervised
from flows.progress import bar
from storage.maintenance.resume_check import find_lost, first_sync
from storage.runs import retention
from storage.runs.attempts import newest_attempt
from storage.runs.retention import GivenUpShards
from storage.runs.run import Run
from tba.config import parse
from tba.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "A run cannot be resumed while a shard that its records admit is missing or damaged. Restore the object if\n"
        "you can. If you cannot, this command stores a record that gives the shard up. Its trajectories are not drawn\n"
        "any more, and steps that could draw them can be queried but not audited. Nothing is removed.",
        "examples:\n"
        "  tba give-up first\n"
        "  tba give-up first trajectories/searcher=000/seq=00000003.parquet --why 'the disk lost it'",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument("keys", metavar="KEY", nargs="*", help="a lost shard, as `tba check` names it (default: all)")
    parser.add_argument("--why", default="lost", metavar="TEXT", help="the reason that the record states")
    parser.add_argument("--json", action="store_true", help="what was given up as one object")


def command(options: argparse.Namespace) -> int:
    return show(open_run(options.run), options.keys, why=options.why, as_json=options.json)


@dataclass(frozen=True)
class Outcome:
    run: str
    retention: int | None  # number of the retention record that gives up the shards; None if nothing is lost
    shards: dict[str, str]  # what is wrong with each shard, by key


def give_up(run: Run, keys: Sequence[str], *, why: str) -> Outcome:
    """Store a retention record that gives up these shards, or all lost shards if no key is given. Raise ConfigError
    before anything is written if one of the shards is not lost or damaged, or if a supervisor looks after the run."""
    refuse_supervised(run, parse(run.config))
    with bar("comparing what is stored with its records") as tell:
        lost = find_lost(run, whole=True, progress=tell)
    if whole := [key for key in keys if key not in lost]:
        raise ConfigError(
            f"KEY: {whole[0]} is not a lost or damaged shard of {run.name}: only such shards can be given up"
        )
    chosen = {key: lost[key] for key in keys or lost}
    if not chosen:
        return Outcome(run.name, None, {})
    shards = GivenUpShards(keys=tuple(sorted(chosen)), first_sync=first_sync(run, chosen), attempt=newest_attempt(run))
    return Outcome(run.name, retention.give_up(run, shards=shards, why=why), chosen)


def show(run: Run, keys: Sequence[str], *, why: str, as_json: bool) -> int:
    outcome = give_up(run, keys, why=why)
    if as_json:
        print(json.dumps(asdict(outcome), indent=1))
    elif not outcome.shards:
        print(f"{run.name} has lost no shard: there is nothing to give up")
    else:
        for key, fault in outcome.shards.items():
            print(f"{key} {fault}: given up")
        print(f"retention/{outcome.retention:06d}.json says so; `tba resume {run.url}` goes on without these shards")
    return 0
