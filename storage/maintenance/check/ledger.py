"""Checks the ledger: the draws and the steps of each sync, and the record with the digests of both.

For the chain of attempts, the ledger must have no gap up to the newest sync that the ledger, a version or a checkpoint
has reached. Objects of other attempts are checked too, each by itself.
"""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from storage import layout
from storage.log.ledger import DRAWS_SCHEMA, LATER, LedgerRecord
from storage.log.sync_records import SyncRecord
from storage.maintenance.check.context import CheckContext
from storage.objects import parquet
from storage.queries import tables
from storage.runs.attempts import Span, accepts
from tba.errors import Damaged
from tba.types import Version

Weights = Mapping[Version, str | None]
"""By version: the sha256 of its weights; None if its manifest does not have it."""


def check_ledger(
    context: CheckContext, spans: Sequence[Span], sync_records: Sequence[SyncRecord], weights: Weights, *, reached: int
) -> None:
    """Check the ledger. Add to the relations the rows of the chain of attempts `spans`, and the steps that each sync
    must have. `reached` is the newest sync of the chain that a version or a checkpoint has reached."""
    findings = context.findings
    draws, steps = _syncs_in(context, layout.DRAWS), _syncs_in(context, layout.STEPS)
    whole = draws & steps
    standing = {name for name in whole if accepts(spans, name)}
    newest = max((name.number for name in standing), default=0)
    upto = max(newest, reached)
    expected = {Version(sync, span.attempt) for sync in range(1, upto + 1) for span in spans if span.covers(sync)}
    ledger_records = _check_records(context, expected, reached=reached)
    objects = _LedgerObjects(context, expected, ledger_records, weights)
    objects.check(draws=draws | expected | ledger_records.keys(), steps=steps | expected | ledger_records.keys())
    if halves := (steps ^ draws) - expected:
        findings.note(
            f"syncs of which only half the ledger is stored, by a trainer that was killed or is running: {len(halves)}"
        )
    _relate_steps(context, expected, {record.sync: record.step for record in sync_records})
    if abandoned := whole - standing:
        findings.note(f"syncs in the ledger that a later attempt repeated after a crash: {len(abandoned)}")
    newest_record = max((record.sync for record in sync_records), default=0)
    if newest_record > upto:
        findings.note(f"the ledger has the steps up to sync {newest}, not yet those up to record {newest_record}")


def _syncs_in(context: CheckContext, folder: str) -> set[Version]:
    return {name for key in context.listed[folder] if (name := layout.parse_ledger(key))}


def _check_records(context: CheckContext, expected: set[Version], *, reached: int) -> dict[Version, LedgerRecord]:
    """Check the ledger records, and return them by sync and attempt. Report each missing record of an `expected` sync
    up to `reached`. If an older run never wrote such records, only note this."""
    findings, listed = context.findings, context.listed[layout.LEDGER]
    ledger_records: dict[Version, LedgerRecord] = {}
    for key in listed:
        with findings.looking_at(key):
            record = LedgerRecord.decode(context.records.read(key), key)
            if key != layout.ledger(record.sync, record.attempt):
                findings.report(key, f"is the record of another ledger: sync {record.sync}, attempt {record.attempt}")
            if before := record.previous:
                context.records.link(key, layout.ledger(before.sync, before.attempt), before.sha256)
            ledger_records[Version(record.sync, record.attempt)] = record
    findings.count("ledger records", len(ledger_records))
    without_digests = 0
    for name in sorted(expected, key=lambda name: name.order):
        key = layout.ledger(*name)
        if key in listed:
            continue
        if not context.run.owner_of(key).digests:
            without_digests += 1
        elif name.number <= reached:
            findings.report(key, "is missing, but a version or a checkpoint has gone past it")
    if without_digests:
        findings.note(f"the ledger of {without_digests} syncs has no digests and is not verified")
    return ledger_records


class _LedgerObjects:
    """Checks objects of draws and of steps against their ledger records. Adds the rows of `expected` syncs to the
    relations, which check that these rows agree with each other."""

    def __init__(
        self,
        context: CheckContext,
        expected: set[Version],
        ledger_records: Mapping[Version, LedgerRecord],
        weights: Weights,
    ):
        self._context, self._expected = context, expected
        self._records, self._weights = ledger_records, weights

    def check(self, *, draws: set[Version], steps: set[Version]) -> None:
        """Check the draws and the steps of these syncs. Report objects that are missing."""
        findings, relations = self._context.findings, self._context.relations
        for name in sorted(draws | steps, key=lambda name: name.order):
            if name in draws:
                with findings.looking_at(layout.draws(*name)):
                    self._check_draws(name)
            if name in steps:
                with findings.looking_at(layout.steps(*name)):
                    self._check_steps(name)
        findings.count("steps", relations.count("steps"))
        findings.count("draws", relations.count("drawn"))

    def _check_draws(self, name: Version) -> None:
        key = layout.draws(*name)
        data = self._context.reading.read(key)
        if record := self._records.get(name):
            record.draws.verify(data, key)
        table = parquet.decode(data, key, DRAWS_SCHEMA, later=LATER)
        self._context.findings.count("ledger objects")
        if name in self._expected:
            self._context.relations.add_draws(table, key=key, sync=name.number)

    def _check_steps(self, name: Version) -> None:
        key = layout.steps(*name)
        data = self._context.reading.read(key)
        if record := self._records.get(name):
            record.steps.verify(data, key)
        table = tables.decode_steps(data, key)
        _check_column(table, "sync", name.number)
        _check_column(table, "attempt", name.attempt)
        digest = self._weights.get(name)
        if digest and {*table["weights_sha256"].drop_null().to_pylist()} - {digest}:
            self._context.findings.report(layout.version(name), f"has another digest of its weights than {key}")
        self._context.findings.count("ledger objects")
        if name in self._expected:
            self._context.relations.add_steps(table, key=key, sync=name.number)


def _check_column(table: pa.Table, column: str, value: int) -> None:
    """Raise Damaged if a row of the column has another value than `value`, which follows from the name of the
    object."""
    if set(table[column].to_pylist()) - {value}:
        raise Damaged(f"has rows of another {column} than its name says")


def _relate_steps(context: CheckContext, expected: set[Version], step_of: Mapping[int, int]) -> None:
    """Add to the relations which steps each expected sync must have: those after the step that the previous sync record
    follows, up to the step that its own sync record follows. Report sync records that are missing."""
    for name in sorted(expected):
        key = layout.sync(name.number)
        if key not in context.listed[layout.SYNCS]:
            context.findings.report(key, "is missing, but the ledger has gone past it")
        elif name.number in step_of and name.number - 1 in step_of:
            steps = range(step_of[name.number - 1] + 1, step_of[name.number] + 1)
            if steps:
                keys = {"steps_key": layout.steps(*name), "draws_key": layout.draws(*name)}
                context.relations.add_sync(name.number, steps, **keys)
