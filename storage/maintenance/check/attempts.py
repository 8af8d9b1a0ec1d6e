"""Checks the records of attempts. None may be missing or damaged, and each must continue a checkpoint that is stored or
was given up. Records of how attempts computed may be missing, as in older runs."""

from collections.abc import Collection, Sequence

from storage import layout
from storage.maintenance.check.context import CheckContext
from storage.objects import records
from storage.queries import tables
from storage.queries.tables import fitting
from storage.runs.attempts import Attempt, Span, chain, read_attempt
from tba.errors import Damaged, Missing
from tba.types import Version


def check_attempts(context: CheckContext) -> tuple[list[Attempt], list[Span]]:
    """Check the records of attempts. Return the attempts whose records can be read, and the chain of attempts that led
    to the newest one. If a record that the chain needs cannot be read, the chain is empty, and each object of the
    ledger is then checked only by itself."""
    findings, listed = context.findings, context.listed[layout.ATTEMPTS]
    attempts: list[Attempt] = []
    for key in listed:
        with findings.looking_at(key):
            fitting([tables.attempt_row(context.records.decode(key))], tables.ATTEMPTS)
            attempt = read_attempt(context.run, layout.parse_attempt(key) or 0)
            context.records.link(key, layout.attempt(attempt.number - 1), attempt.previous_sha256)
            attempts.append(attempt)
    findings.count("attempts", len(attempts))
    for number in range(1, max((attempt.number for attempt in attempts), default=0) + 1):
        if layout.attempt(number) not in listed:
            findings.report(layout.attempt(number), "is missing")
    for key in context.listed[layout.ARITHMETIC]:
        with findings.looking_at(key):
            tables.arithmetic_row(key, context.records.read(key))
    try:
        with records.reading(layout.ATTEMPTS):
            return attempts, chain(context.run)
    except (Missing, Damaged):  # already reported above
        return attempts, []


def check_continued(context: CheckContext, attempts: Sequence[Attempt], checkpoints: Collection[Version]) -> None:
    """Report each attempt that continues a checkpoint which is not among `checkpoints`, those that are stored or given
    up. Attempts that a fork inherits are left to the check of its parent."""
    inherited = context.run.parent.attempts if context.run.parent else 0
    for attempt in attempts:
        if attempt.number > inherited and attempt.continues and attempt.continues not in checkpoints:
            context.findings.report(
                layout.attempt(attempt.number),
                f"continues checkpoint {attempt.continues}, which is neither stored nor given up",
            )
