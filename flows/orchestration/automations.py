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

SILENT_AFTER = timedelta(seconds=120)  # four heartbeats: prefect.yaml sets one every 30 s
ANOTHER_GO_EVERY = timedelta(minutes=10)
OURS = {
    "prefect.resource.role": "flow",
    "prefect.resource.name": ["tba", "searcher", "trainer", "trainer-node", "evaluate"],
}


def automations(tell: Block | None = None, *, silent_after: timedelta = SILENT_AFTER) -> list[AutomationCore]:
    always = [silence(silent_after), another_go()]
    return [*always, telling(tell)] if tell else always


def silence(after: timedelta) -> AutomationCore:
    """Return an automation that marks a flow run as crashed after `after` without a heartbeat, because its process or
    machine is gone. Otherwise the flow run would stay Running for ever. The role that the flow run watched may
    still be alive: the supervisor then adopts it."""
    return AutomationCore(
        name="tba: a flow run without a sign has crashed",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.*"},
            match_related=OURS,  # only these deployments set heartbeats that are frequent enough
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=after,
        ),
        actions=[
            ChangeFlowRunState(
                state=StateType.CRASHED,
                name=None,
                message=f"its process has sent no heartbeat for {after.total_seconds():.0f} s",
                force=False,
            )
        ],
    )


def another_go() -> AutomationCore:
    """Return an automation that schedules a crashed flow run `tba` again. The flow run then finds its run and adopts
    the roles that are alive. This happens at most once in ten minutes, so that a flow run which always crashes
    immediately is not restarted in a loop."""
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
    """Return an automation that sends the events of runs through a notification block."""
    assert block._block_document_id  # set because the block was loaded
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
    """Create the automations, or update those whose names exist already. Return the names."""
    for core in wanted:
        automation = Automation(**core.model_dump())
        try:
            existing = cast(Automation, Automation.read(name=core.name))  # no coroutine: there is no event loop here
        except ValueError:
            automation.create()
        else:
            automation.id = existing.id
            automation.update()
    return [core.name for core in wanted]


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
        help="time without heartbeats after which a flow run counts as crashed (default %(default)g)",
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
