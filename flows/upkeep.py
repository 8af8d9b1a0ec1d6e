"""The flow `compact`, to be run now and then, or on a schedule, also beside a run that lives.

prefect deployment run compact/compact --param run=s3://bucket/x/runs/first --param drop_payloads=true
"""

from prefect import flow, task
from prefect.logging import get_run_logger

from flows.compact import compact_run, describe
from storage.run import Run, resolve


@flow(name="compact", persist_result=False)
def compact(run: str, drop_payloads: bool = False) -> None:
    """Bring the shards of a run into few objects.

    Args:
        run: Its URL, or its name under the default root.
        drop_payloads: Give up the tokens of trajectories that no later step can draw; text, rewards and all else stay.
            From then on only steps after the oldest checkpoint can be audited and forked.
    """
    compact_shards(run, drop_payloads)


@task(persist_result=False)
def compact_shards(run: str, drop_payloads: bool) -> None:
    get_run_logger().info(
        describe(compact_run(Run.open(resolve(run)), drop_payloads=drop_payloads), drop_payloads=drop_payloads)
    )
