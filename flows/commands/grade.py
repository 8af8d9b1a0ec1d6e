"""`tba grade`: score responses from any source with the reward of a task."""

import argparse
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from flows.commands.arguments import explain
from storage.objects import strict_json
from tba.errors import ConfigError, DataError
from tba.tasks.registry import grade, rules


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        'FILE has one JSON object per line with "response" and "answer"; the same objects come out with "reward".\n'
        'An answer is bare, such as "1200". In GSM8K\'s files it is the text after ####, without commas.',
        "example:\n  tba grade gsm8k responses.jsonl --rule after-hashes > graded.jsonl",
    )
    parser.add_argument(
        "task",
        metavar="TASK",
        help="task whose reward is used: quickstart, gsm8k, math, reasoning-gym, or a task of your own",
    )
    parser.add_argument("file", metavar="FILE", help="JSON lines; - is standard input")
    parser.add_argument("--rule", default="", help="how the answer is read out, for tasks with several rules")


def command(options: argparse.Namespace) -> int:
    return grade_file(options.task, options.file, rule=options.rule)


def grade_file(task: str, file: str, *, rule: str = "") -> int:
    """Print each object of a file of JSON lines with its reward. Print the mean on standard error at the end."""
    known = rules(task)
    if rule and rule not in known:
        raise ConfigError(f"--rule must be one of {', '.join(known)} for task {task!r}, got {rule!r}")
    rewards: list[float] = []
    with _lines(file) as lines:
        for row in _rows(lines, file):
            reward = grade(task, rule, row["response"], row["answer"])
            rewards.append(reward)
            print(json.dumps({**row, "reward": reward}, ensure_ascii=False))
    mean = f", mean reward {sum(rewards) / len(rewards):.4f}" if rewards else ""
    print(f"{len(rewards)} responses{mean}", file=sys.stderr)
    return 0


@contextmanager
def _lines(file: str) -> Iterator[Iterable[str]]:
    """Yield the lines of a file. Only an OSError from opening the file becomes a DataError; errors of the code that
    reads the lines pass unchanged."""
    if file == "-":
        yield sys.stdin
        return
    with ExitStack() as stack:
        try:
            lines = stack.enter_context(open(file, encoding="utf-8"))
        except OSError as error:
            raise DataError(f"{file}: {error.strerror}") from None
        yield lines


def _rows(lines: Iterable[str], file: str) -> Iterator[dict[str, Any]]:
    for number, line in _numbered(lines, file):
        if not line.strip():
            continue
        try:
            row = strict_json.loads(line)
        except strict_json.DoubledKey as error:
            raise DataError(f"{file} line {number}: {error}") from None
        except ValueError as error:
            raise DataError(f"{file} line {number}: not JSON: {error}") from None
        for field in ("response", "answer"):
            if not isinstance(row, dict) or not isinstance(row.get(field), str):
                raise DataError(f"{file} line {number}: an object with text under {field!r} is needed")
        yield row


def _numbered(lines: Iterable[str], file: str) -> Iterator[tuple[int, str]]:
    try:
        yield from enumerate(lines, start=1)
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8: {error.reason} at byte {error.start}") from None
