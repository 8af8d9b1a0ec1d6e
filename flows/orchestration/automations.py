"""Automations of Prefect for a server that runs go through.

    python -m flows.orchestration.automations [--tell TYPE/NAME]

The automations mark a flow run as crashed if its heartbeats stop, start a new supervisor for a run whose supervisor has
crashed, and send alarms through a notification block of the given name. Missing automations are made, and existing ones
are brought up to date.
"""

import argparse
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

from prefect.automations import Automation, AutomationCore, ChangeFlowRunState, EventTrigger, Posture, SendNotification
from prefect.blocks.core import Block
from prefect.client.schemas.objects import StateType
from prefect.exceptions import PrefectHTTPStatusError

SILENT_AFTER = timedelta(seconds=120)  # four heartbeats, of which prefect.yaml asks for one in 30 s
ANOTHER_GO_EVERY = timedelta(minutes=10)
OURS = {"prefect.resource.role": "flow", "prefect.resource.name": ["tba", "searcher", "trainer", "evaluate"]}


def automations(tell: Block | None = None, *, silent_after: timedelta = SILENT_AFTER) -> list[AutomationCore]:
    found = [silence(silent_after), another_go()]
    return [*found, telling(tell)] if tell else found


def silence(after: timedelta) -> AutomationCore:
    """What watches a role was killed, or its machine is gone: without this its flow run stays Running for ever. The
    role itself, if it lives, is adopted."""
    return AutomationCore(
        name="tba: a flow run without a sign has crashed",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match_related=OURS,  # whose deployments ask for heartbeats as frequent
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=after,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                name=None,
                message=f"no sign of its process for {after.total_seconds():.0f} s",
                force=False,
            )
        ],
    )


def another_go() -> AutomationCore:
    """The same flow run again, which finds its run and adopts the roles that live: at most once in ten minutes, so
    that what crashes at once each time does not go round in circles."""
    return AutomationCore(
        name="tba: a supervisor that crashed has another go",
        trigger=EventTrigger(
            expect={"prefect.flow-run.Crashed"},
            match_related={**OURS, "prefect.resource.name": "tba"},
            for_each={"prefect.resource.id"},
            posture=Posture.Reactive,
            threshold=1,
            within=ANOTHER_GO_EVERY,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.SCHEDULED, name="AwaitingRetry", message="its supervisor crashed", force=True
            )
        ],
    )


def telling(block: Block) -> AutomationCore:
    assert block._block_document_id  # it was loaded
    return AutomationCore(
        name="tba: alarms are told",
        trigger=EventTrigger(
            expect={"tba.*"}, match={"prefect.resource.id": "tba.run.*"}, posture=Posture.Reactive, threshold=1
        ),
        actions=[
            SendNotification(
                block_document_id=block._block_document_id,
                subject="{{ event.resource.name }}: {{ event.event }}",
                body="{{ event.payload.message }}",
            )
        ],
    )


def establish(wanted: Sequence[AutomationCore]) -> list[str]:
    """As many of each name as are wanted, however often it is asked for; returns the names."""
    for it in wanted:
        made = Automation(**it.model_dump())
        try:
            there = cast(Automation, Automation.read(name=it.name))  # outside of an event loop it is not a coroutine
        except ValueError:
            made.create()
        else:
            made.id = there.id
            made.update()
    return [it.name for it in wanted]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m flows.orchestration.automations", description=(__doc__ or "").split("\n\n")[2]
    )
    parser.add_argument("--tell", metavar="TYPE/NAME", help="a notification block, such as slack-webhook/team")
    parser.add_argument(
        "--silent-after",
        type=float,
        default=SILENT_AFTER.total_seconds(),
        metavar="SECONDS",
        help="default %(default)g",
    )
    options = parser.parse_args(arguments)
    try:
        tell = cast(Block, Block.load(options.tell)) if options.tell else None
        for name in establish(automations(tell, silent_after=timedelta(seconds=options.silent_after))):
            print(name)
    except (ValueError, PrefectHTTPStatusError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
