"""Checks run.json, the wanted state, the places where ranks met, the leases and the events."""

from storage import layout
from storage.maintenance.check.context import CheckContext
from storage.queries import tables
from storage.queries.tables import fitting
from storage.runs import rendezvous
from storage.runs.control import read_state
from storage.runs.leases import decode_lease
from tba.errors import Missing


def check_roles(context: CheckContext) -> None:
    run, findings = context.run, context.findings
    events, leases = context.listed[layout.EVENTS], list(filter(layout.parse_lease, context.listed[layout.ROLES]))
    for key in events:
        with findings.looking_at(key):
            _check_event(context, key)
    with findings.looking_at(layout.RUN):
        context.records.decode(layout.RUN)
    for key in leases:
        with findings.looking_at(key):
            decode_lease(run, key, context.records.read(key))
    with findings.looking_at(layout.STATE):
        if run.store.exists(layout.STATE):
            context.records.read(layout.STATE)
            read_state(run)
        elif leases:
            raise Missing(layout.STATE)  # the state is written before any role starts
    for key in context.listed[layout.RENDEZVOUS]:
        with findings.looking_at(key):
            rendezvous.decode(context.records.read(key), key, layout.parse_rendezvous(key) or 0)
    findings.count("events", len(events))


def _check_event(context: CheckContext, key: str) -> None:
    event = context.records.decode(key)
    fitting([tables.event_row(event)], tables.EVENTS)
    if before := event.get("previous"):
        previous = layout.event(key.split("/")[1], event["life"], before["seq"])
        context.records.link(key, previous, before["sha256"])
