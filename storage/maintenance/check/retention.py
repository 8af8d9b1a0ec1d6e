"""Checks the retention records."""

from storage import layout
from storage.maintenance.check.context import CheckContext
from storage.objects import records
from storage.runs.retention import GivenUp, RetentionRecord, given_up, given_up_payloads
from tba.errors import Damaged, Missing
from tba.types import Version


def check_retention(context: CheckContext) -> tuple[GivenUp, list[RetentionRecord]]:
    """Check the retention records. Return what they give up, and the records that give up payloads. If a record cannot
    be read, no version, checkpoint or shard counts as given up."""
    findings = context.findings
    for key in context.listed[layout.RETENTION]:
        with findings.looking_at(key):
            record = context.records.decode(key, "retention", "removed", "why")
            removed, number = record["removed"], record["retention"]
            if key != layout.retention(number):
                findings.report(key, f"is another record, number {number}")
            context.records.link(key, layout.retention(number - 1), record.get("previous_sha256"))
            for name in (*removed["versions"], *removed["checkpoints"]):
                Version.parse(name)
    payloads: list[RetentionRecord] = []
    try:
        with records.reading(layout.RETENTION):
            payloads = given_up_payloads(context.run)
            return given_up(context.run), payloads
    except (Missing, Damaged):  # already reported above
        return GivenUp(versions=frozenset(), checkpoints=frozenset()), payloads
