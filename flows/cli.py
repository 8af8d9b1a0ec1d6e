"""The command `tba`: one subcommand per thing a person asks for.

Each imports what it needs when it is called, so that asking for help is quick and looking at a run needs neither torch
nor Prefect.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from flows.progress import was_interrupted
from tba.errors import ConfigError, DataError, Missing, TBAError

if TYPE_CHECKING:
    from storage.runs.run import Run

DONE, FOUND_WRONG, BAD_USAGE, INTERRUPTED = 0, 1, 2, 130

_ABOUT = """\
Asynchronous RL post-training of language models with trajectory balance.

Searchers generate responses without waiting for training, a trainer learns without waiting for generation, and
between them lies a log of everything on disk or in a bucket that anyone can query with SQL."""

_RUN = "a run: its name under the default root ($TBA_ROOT, else tba-runs/), a path with a '/' in it, or an s3:// URL"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = build_parser()
    options = parser.parse_args(arguments)
    logging.getLogger("flows").setLevel(logging.INFO)
    logging.basicConfig(format="%(message)s")  # on standard error: what takes long says so before
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
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except OSError as error:  # a full disk, a folder that may not be read
        if options.debug or not error.strerror:
            raise
        print(f"error: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return FOUND_WRONG


# --- what can be asked for ------------------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tba", description=_ABOUT, formatter_class=_Help)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Command)
    _add_run(commands)
    _add_resume(commands)
    _add_runs(commands)
    _add_watch(commands)
    _add_scale(commands)
    _add_stop(commands)
    _add_sql(commands)
    _add_report(commands)
    _add_browse(commands)
    _add_check(commands)
    _add_compact(commands)
    _add_give_up(commands)
    _add_export(commands)
    _add_import(commands)
    _add_wandb(commands)
    _add_grade(commands)
    _add_audit(commands)
    _add_fork(commands)
    return parser


class _Command(argparse.ArgumentParser):
    """Takes what has no name of its own before, between and after options."""

    _is_inside = False

    def parse_known_args(  # pyright: ignore[reportIncompatibleMethodOverride]  # overloaded there
        self, args: Any = None, namespace: Any = None
    ) -> Any:
        if self._is_inside:  # of the call below, which comes back twice: for options, then for the rest
            return super().parse_known_args(args, namespace)
        self._is_inside = True
        try:
            return self.parse_known_intermixed_args(args, namespace)
        finally:
            self._is_inside = False


class _Help(argparse.RawDescriptionHelpFormatter):
    """Texts as they are written, with room for the names of options."""

    def __init__(self, prog: str):
        super().__init__(prog, max_help_position=32)


def _add(
    commands: Any, name: str, command: Callable[[argparse.Namespace], int], summary: str, *about: str
) -> argparse.ArgumentParser:
    """A subcommand: one line for the list of commands, then what its own help says."""
    description, epilog = "\n\n".join([summary, *about[:-1]]), about[-1] if about else None
    parser = commands.add_parser(
        name, help=summary, description=description, epilog=epilog, formatter_class=_Help, allow_abbrev=False
    )
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of errors")
    parser.set_defaults(command=command)
    return parser


def _add_run(commands: Any) -> None:
    parser = _add(
        commands,
        "run",
        run_command,
        "Train on a task, from its settings to a finished run.",
        "Starts the searchers, the trainer and the evaluator on this machine and watches over them. Everything they\n"
        "find is stored under ROOT/runs/NAME. Ctrl-C stops them in order; `tba resume` goes on from there.",
        "examples:\n"
        "  tba run quickstart\n"
        "  tba run quickstart --name first --steps 80 --set training.learning_rate=1e-4\n"
        "  tba run gsm8k --root s3://bucket/experiments --searchers 3 --dry-run",
    )
    parser.add_argument(
        "task",
        metavar="TASK",
        help="quickstart, gsm8k, math, tldr, redteam, verifiers, or one from elsewhere: docs/tasks.md",
    )
    _add_set(parser)
    parser.add_argument("--root", help="folder or s3:// URL for runs (default: $TBA_ROOT, else tba-runs)")
    parser.add_argument("--name", help="name of the run (default: the task and the time)")
    parser.add_argument("--steps", type=int, help="gradient steps to take")
    parser.add_argument("--searchers", type=int, help="searchers to start")
    parser.add_argument("--seed", type=int, help="of everything random")
    parser.add_argument("--dry-run", action="store_true", help="show what the settings amount to and start nothing")


def _add_resume(commands: Any) -> None:
    parser = _add(
        commands,
        "resume",
        resume_command,
        "Continue an interrupted run.",
        "The trainer goes on from its newest intact checkpoint and takes the steps since then again, on the same\n"
        "data; roles that are still alive are adopted. Nothing that was stored is lost or counted twice. It keeps\n"
        "its settings: `tba fork` goes on with others.",
        "example:\n  tba resume first",
    )
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument("--set", nargs="*", dest="changes", help=argparse.SUPPRESS)  # to say who takes it


def _add_runs(commands: Any) -> None:
    parser = _add(
        commands,
        "runs",
        runs_command,
        "List the runs under a root, newest first.",
        "example:\n  tba runs s3://bucket/experiments",
    )
    parser.add_argument("root", metavar="ROOT", nargs="?", help="folder or URL (default: $TBA_ROOT, else tba-runs)")
    parser.add_argument("--json", action="store_true", help="a list of objects instead of a table")


def _add_watch(commands: Any) -> None:
    parser = _add(
        commands,
        "watch",
        watch_command,
        "Follow a run live: progress, scores, ages, who waits for whom.",
        "Reads the run's storage alone, so it works from any machine that can see it. Ctrl-C ends it, not the run.\n"
        "Into a file or a pipe it prints a line whenever something has changed.",
        "example:\n  tba watch first",
    )
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.add_argument(
        "--every", type=_seconds, default=3.0, metavar="SECONDS", help="between two looks (default: %(default)s)"
    )


def _add_scale(commands: Any) -> None:
    parser = _add(
        commands,
        "scale",
        scale_command,
        "Change how many searchers a run has, while it runs.",
        "From any machine that reaches its storage: whoever looks after the run starts those that are missing, and\n"
        "the last ones stop after the round they are at. An interrupted run has so many when it is resumed. With 0 a\n"
        "run goes on with the responses that it has, and with what `tba import` brings.",
        "example:\n  tba scale first --searchers 4",
    )
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument("--searchers", type=int, required=True, metavar="N", help="how many there should be")


def _add_stop(commands: Any) -> None:
    parser = _add(
        commands,
        "stop",
        stop_command,
        "Stop a run in order, wherever it runs.",
        "The trainer makes a checkpoint at the next sync, so that nothing is taken again; `tba resume` goes on.",
        "example:\n  tba stop first",
    )
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument("--why", default="tba stop", metavar="TEXT", help="what the run says about it")
    parser.add_argument("--no-wait", action="store_true", help="ask, and do not wait until all roles have stopped")


def _add_sql(commands: Any) -> None:
    parser = _add(
        commands,
        "sql",
        sql_command,
        "Query a run with SQL, also while it is running.",
        "`from help()` lists the views, such as trajectories, steps and draws, and the macros for common questions;\n"
        "`from help('draws')` explains one. The dialect is DuckDB's. Queries can only read, and only this run.\n"
        "Without QUERY there is a prompt.",
        "examples:\n"
        '  tba sql first "select version_start, avg(reward) from trajectories group by 1 order by 1"\n'
        '  tba sql first "select * from evaluations" --csv\n'
        "  tba sql first -f question.sql --parquet answer.parquet",
    )
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument("query", metavar="QUERY", nargs="?", help="one or more statements; the last one is shown")
    parser.add_argument("-f", "--file", metavar="FILE", help="read the query from a file, instead; - is standard input")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--csv", action="store_true", help="print comma-separated values with a header")
    form.add_argument("--json", action="store_true", help="print a list of rows")
    form.add_argument("--parquet", metavar="FILE", help="write the rows to a new Parquet file")


def _add_report(commands: Any) -> None:
    parser = _add(
        commands,
        "report",
        report_command,
        "Write one HTML file with the curves, tables and samples of a run, or with several runs compared.",
        "The file needs no network and nothing beside it.",
        "examples:\n  tba report first --output first.html\n  tba report first firmer",
    )
    parser.add_argument("run", metavar="RUN", nargs="+", help=_RUN)
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="default: report.html in the run's folder, RUN-report.html for a remote run, or comparison.html",
    )


def _add_browse(commands: Any) -> None:
    parser = _add(
        commands,
        "browse",
        browse_command,
        "Look through a run's log in a browser, also while it is running.",
        "Trajectories by form or by SQL, each token by token with the steps that drew it and the version that made\n"
        "it; steps with what they learned from, and in words why. It only reads, and only this machine sees it: with\n"
        "another --host whoever looks needs the token that is printed.",
        "example:\n  tba browse first",
    )
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument("--port", type=_port, default=8610, metavar="N", help="default: 8610; 0 is any that is free")
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1, this machine alone)")
    parser.add_argument("--token", action="store_true", help="ask for a token on this machine, too")
    parser.add_argument(
        "--seconds", type=_seconds, default=20.0, metavar="S", help="the longest that a query may take (default: 20)"
    )


def _add_check(commands: Any) -> None:
    parser = _add(
        commands,
        "check",
        check_command,
        "Verify everything a run has stored.",
        "Every record against every object: checksums, gaps, duplicates, draws without a trajectory, unfinished\n"
        "writes. Changes nothing. Ends with 0 if all is well and with 1 if something is wrong.",
        "example:\n  tba check first",
    )
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument("--json", action="store_true", help="the findings as one object instead of a table")


def _add_compact(commands: Any) -> None:
    parser = _add(
        commands,
        "compact",
        compact_command,
        "Bring the shards of a run into few objects.",
        "Of what was admitted before the oldest checkpoint that the run keeps for itself. Queries of long runs become\n"
        "faster; nothing else changes. Can be done while the run lives, and again at any time.\n"
        "With --drop-payloads trajectories that no later step can draw lose their tokens and log-probabilities: from\n"
        "then on only steps after that checkpoint can be audited and forked. Forks that exist keep what they need.",
        "example:\n  tba compact first",
    )
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument("--drop-payloads", action="store_true", help="give up tokens that no later step can draw")
    parser.add_argument("--json", action="store_true", help="what was done as one object")


def _add_give_up(commands: Any) -> None:
    parser = _add(
        commands,
        "give-up",
        give_up_command,
        "Let a run go on without shards that are lost.",
        "A run is not resumed while a shard that its records admit is missing or damaged. Restore the object where\n"
        "you can. Where you cannot, this command stores a record that gives the shard up: its trajectories are drawn\n"
        "no more, and steps that were taken while it was there can be queried but not audited. Nothing is removed.",
        "examples:\n"
        "  tba give-up first\n"
        "  tba give-up first trajectories/searcher=000/seq=00000003.parquet --why 'the disk lost it'",
    )
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument("keys", metavar="KEY", nargs="*", help="a lost shard, as `tba check` names it (default: all)")
    parser.add_argument("--why", default="lost", metavar="TEXT", help="the reason that the record states")
    parser.add_argument("--json", action="store_true", help="what was given up as one object")


def _add_export(commands: Any) -> None:
    parser = _add(
        commands,
        "export",
        export_command,
        "Copy a version out of a run, as a Hugging Face folder; or rows, as a dataset.",
        "A version's files are verified against their checksums. Which versions are kept is in the view `versions`:\n"
        "  tba sql RUN \"select * from versions where state = 'kept'\"\n"
        "With --query it is Parquet with a card, which `datasets.load_dataset` reads: any rows that SQL can say, such\n"
        "as responses to imitate, or pairs to prefer by.",
        "examples:\n"
        "  tba export first --version 60 ./policy\n"
        '  tba export first --query "from demonstrations(least_reward := 1)" ./imitate\n'
        '  tba export first --query "from preferences()" ./pairs',
    )
    parser.add_argument("run", metavar="RUN", help=_RUN)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--version", type=int, metavar="N", help="number of the version; 0 is the start")
    what.add_argument("--query", metavar="SQL", help="the rows of a dataset; all of it is `from trajectories`")
    parser.add_argument("--attempt", type=int, metavar="A", help="of which attempt (default: the newest that has it)")
    parser.add_argument("--adapter", action="store_true", help="of adapters: as it is, not merged into its base")
    parser.add_argument("folder", metavar="DIR", help="a folder that does not exist yet, or is empty")


def _add_import(commands: Any) -> None:
    parser = _add(
        commands,
        "import",
        import_command,
        "Take responses from elsewhere into a run, to be trained on.",
        "FILES are JSON lines or Parquet, also at s3:// or hf:// URLs, or folders that `tba export --query` made.\n"
        "A row has `prompt_id`, or the text of the `prompt`; a `response`, or `response_tokens`; and, if known, its\n"
        "`reward`, whether it is `finished`, and `behaviour_logps`. What has no reward is scored by the task.\n"
        "Nothing is stored unless all rows are good, and what has been imported before is not stored again.",
        "examples:\n"
        "  tba import first rollouts.jsonl --map response=completion --map reward=score\n"
        "  tba import first ./imitate --dry-run",
    )
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument("files", metavar="FILES", nargs="+", help="each becomes one shard, or is told to be imported")
    parser.add_argument(
        "--map",
        metavar="FIELD=NAME",
        action="append",
        nargs="+",
        default=[],
        dest="renamed",
        help="what a field is called in the files; may be repeated",
    )
    parser.add_argument(
        "--version", type=int, metavar="N", help="count them as by this version (default: 0, the start)"
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be imported and store nothing")


def _add_wandb(commands: Any) -> None:
    parser = _add(
        commands,
        "wandb",
        wandb_command,
        "Write the metrics and scores of a run to Weights & Biases, from its log.",
        "For a run that had W&B off, or whose W&B run was lost: a new W&B run has each step and each evaluated\n"
        "version once. It is written offline, and `wandb sync` sends it, unless --online.",
        "example:\n  tba wandb first --project experiments",
    )
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument("--project", help="of W&B (default: metrics.wandb_project of the run)")
    parser.add_argument("--online", action="store_true", help="send it at once")


def _add_grade(commands: Any) -> None:
    parser = _add(
        commands,
        "grade",
        grade_command,
        "Score responses offline with the reward of a task.",
        'FILE has one JSON object per line with "response" and "answer"; the same objects come out with "reward".\n'
        'An answer is bare, such as "1200": of GSM8K\'s files what follows ####, without commas.',
        "example:\n  tba grade gsm8k responses.jsonl --rule after-hashes > graded.jsonl",
    )
    parser.add_argument("task", metavar="TASK", help="whose reward: quickstart, gsm8k, math, or one from elsewhere")
    parser.add_argument("file", metavar="FILE", help="JSON lines; - is standard input")
    parser.add_argument("--rule", default="", help="how an answer is read, where a task has several rules")


def _add_audit(commands: Any) -> None:
    parser = _add(
        commands,
        "audit",
        audit_command,
        "Take a past step again from storage and compare.",
        "The state before the step is that of the nearest checkpoint; the batch, loss, gradient norm and what was\n"
        "found for each row are compared with the ledger, the resulting weights with its checksum at the next sync.\n"
        "On a CPU they are the same bit by bit. Ends with 0 if all agrees and with 1 if something differs.",
        "example:\n  tba audit first --step 300",
    )
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the step in question")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="relative difference that is accepted (default: 0 on a CPU, 0.01 on other devices)",
    )
    parser.add_argument("--json", action="store_true", help="the comparison as one object instead of a table")


def _add_fork(commands: Any) -> None:
    parser = _add(
        commands,
        "fork",
        fork_command,
        "Start a new run from a past step of another.",
        "The fork lies beside its parent and shares what that had stored by then; nothing is copied, and nothing of\n"
        "the parent changes. With --replay it has no searchers: it trains on what its parent recorded, so that\n"
        "another sampler, another beta or another number of steps per sync can be tried without generating again.",
        "examples:\n"
        "  tba fork first --step 200 --set training.learning_rate=1e-4\n"
        "  tba fork first --step 0 --replay --name uniform --set sampling.recent_share=0",
    )
    parser.add_argument("run", metavar="RUN", help=_RUN)
    parser.add_argument(
        "--step", type=int, required=True, metavar="N", help="a step that a sync follows; 0 is the start"
    )
    _add_set(parser)
    parser.add_argument("--replay", action="store_true", help="train on the recorded trajectories alone")
    parser.add_argument("--name", help="name of the fork (default: the parent's and the step)")
    parser.add_argument("--no-start", action="store_true", help="make the run and leave it to `tba resume`")


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        nargs="+",
        default=[],
        dest="changes",
        help="change a setting by its dotted name, such as sampling.recent_share=0.9; may be repeated",
    )


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 65536):
        raise argparse.ArgumentTypeError(f"a number from 0 to 65535, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number of seconds, got {text!r}") from None
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"between 0.1 and 3600 seconds, got {text}")
    return seconds


# --- doing it -------------------------------------------------------------------------------------------------------


def open_run(name: str) -> "Run":
    """The run a person named; one that does not exist is bad usage, not a fault of storage."""
    from storage.runs.run import Run, resolve

    try:
        return Run.open(resolve(name))
    except Missing as error:
        raise ConfigError(str(error)) from None


def run_command(options: argparse.Namespace) -> int:
    from flows.planning import create, describe, resolve

    config = resolve.resolve(
        options.task,
        _changes(options),
        steps=options.steps,
        searchers=options.searchers,
        seed=options.seed,
    )
    if options.dry_run:
        create.refuse_taken(options.root, options.name)
        print(describe.describe(config))
        return DONE
    return supervise(create.start(config, options.root, options.name, created_by="tba run"))


def resume_command(options: argparse.Namespace) -> int:
    from flows.pages.markdown import last_scores, where_next
    from flows.planning import create, run_summary
    from tba.config import parse_known

    if options.changes is not None:
        raise ConfigError(
            f"--set: a run keeps its settings; `tba fork {options.run} --step N --set …` goes on from a step with "
            "others"
        )
    run = open_run(options.run)
    if run_summary.has_all(run):
        replays = run.parent is not None and run.parent.replays is not None
        last = parse_known(run.config).training.steps
        further = "" if replays else f"; `tba fork {run.url} --step {last} --set training.steps=…` goes further"
        print(f"run {run.name} has finished already{further}\n{last_scores(run)}\n\n{where_next(run)}")
        return DONE
    run, _ = create.resume(run.url)
    return supervise(run)


def supervise(run: "Run") -> int:
    """Keep a run's roles alive on this machine until it has finished, then say what came of it and where to look."""
    from flows.pages.markdown import last_scores, where_next
    from flows.supervision.terminal import run_here

    print(f"run {run.name} at {run.url}", file=sys.stderr)
    run_here(run)
    print(f"{last_scores(run)}\n\n{where_next(run)}")
    return DONE


def runs_command(options: argparse.Namespace) -> int:
    from flows.commands import runs

    return runs.show(options.root, as_json=options.json)


def scale_command(options: argparse.Namespace) -> int:
    from flows.commands import scale

    print(scale.scale(open_run(options.run), options.searchers))
    return DONE


def stop_command(options: argparse.Namespace) -> int:
    from flows.commands import stop

    def tell(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    print(stop.stop(open_run(options.run), options.why, wait=not options.no_wait, tell=tell))
    return DONE


def watch_command(options: argparse.Namespace) -> int:
    from flows.commands import watch

    watch.watch(open_run(options.run), once=options.once, every=options.every)
    return DONE


def sql_command(options: argparse.Namespace) -> int:
    from flows.commands import sql

    if options.query and options.file:
        raise ConfigError("-f: there is a QUERY already; only one of them can be answered")
    return sql.answer(
        open_run(options.run), options.query, options.file, csv=options.csv, json=options.json, parquet=options.parquet
    )


def report_command(options: argparse.Namespace) -> int:
    from flows.pages.report import comparison, page

    runs = [open_run(name) for name in options.run]
    print(comparison.write(runs, options.output) if len(runs) > 1 else page.write(runs[0], options.output))
    return DONE


def browse_command(options: argparse.Namespace) -> int:
    from flows.pages.browse import server

    return server.browse(
        open_run(options.run),
        host=options.host,
        port=options.port,
        with_token=options.token,
        seconds=options.seconds,
    )


def check_command(options: argparse.Namespace) -> int:
    from flows.commands import check

    return check.show(open_run(options.run), as_json=options.json)


def compact_command(options: argparse.Namespace) -> int:
    from flows.commands import compact

    return compact.show(open_run(options.run), drop_payloads=options.drop_payloads, as_json=options.json)


def give_up_command(options: argparse.Namespace) -> int:
    from flows.commands import give_up

    return give_up.show(open_run(options.run), options.keys, why=options.why, as_json=options.json)


def export_command(options: argparse.Namespace) -> int:
    from flows.commands import export_rows, export_version

    run, adapter = open_run(options.run), options.adapter
    if options.query is None:
        print(export_version.export(run, options.version, options.attempt, options.folder, adapter=adapter))
    elif adapter or options.attempt is not None:
        raise ConfigError(f"{'--adapter' if adapter else '--attempt'} does not apply to --query")
    else:
        print(export_rows.export(run, options.query, options.folder))
    return DONE


def import_command(options: argparse.Namespace) -> int:
    from flows.commands import import_

    told = import_.import_files(
        open_run(options.run),
        options.files,
        renamed=[text for texts in options.renamed for text in texts],
        version=options.version,
        dry_run=options.dry_run,
    )
    print("\n".join(told))
    return DONE


def wandb_command(options: argparse.Namespace) -> int:
    from storage.metrics.wandb_writer import rebuild

    run = open_run(options.run)
    project = options.project or run.config.get("metrics", {}).get("wandb_project", "tba")
    folder, steps, versions = rebuild(run, project, "online" if options.online else "offline")
    print(f"{steps} steps and the scores of {versions} versions")
    print(folder if options.online else f"wandb sync {folder}")
    return DONE


def grade_command(options: argparse.Namespace) -> int:
    from flows.commands import grade

    return grade.grade_file(options.task, options.file, rule=options.rule)


def audit_command(options: argparse.Namespace) -> int:
    from flows.commands import audit

    run = open_run(options.run)
    return audit.show(run, options.step, tolerance=options.tolerance, as_json=options.json)


def fork_command(options: argparse.Namespace) -> int:
    from flows.commands import fork

    parent = open_run(options.run)
    run = fork.fork(parent, options.step, _changes(options), name=options.name, replay=options.replay)
    if options.no_start:
        print(run.url)
        return DONE
    return supervise(run)


def _changes(options: argparse.Namespace) -> dict[str, Any]:
    return dict(_change(text) for texts in options.changes for text in texts)


def _change(text: str) -> tuple[str, Any]:
    """A list, an object or null is JSON; whatever else is text, which the settings read as what they expect."""
    key, separator, value = text.partition("=")
    if not (key and separator):
        raise ConfigError(f"--set: KEY=VALUE, such as training.steps=100, got {text!r}")
    if value == "null" or value.startswith(("[", "{")):
        from storage.objects import strict_json

        try:
            return key, strict_json.loads(value)
        except strict_json.DoubledKey as error:
            raise ConfigError(f"--set: {key}: {error}, got {value!r:.200}") from None
        except ValueError:
            return key, value
    return key, value


if __name__ == "__main__":
    sys.exit(main())
