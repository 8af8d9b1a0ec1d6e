"""The flows `compact` and `retention`, to be run now and then, or on a schedule, also beside runs that live.

prefect deployment run compact/compact --param run=s3://bucket/x/runs/first --param drop_payloads=true
prefect --no-prompt deploy --name nightly --cron "0 4 * * *"
"""

from prefect import flow, task
from prefect.logging import get_run_logger

from flows.commands.compact import compact_all, compact_run, describe
from storage.runs.run import Run, default_root, resolve
from tba.errors import RunFailed


@flow(name="compact", persist_result=False)
def compact(run: str, drop_payloads: bool = False) -> None:
    """Bring the shards of a run into few objects.

    Args:
        run: Its URL, or its name under the default root.
        drop_payloads: Give up the tokens of trajectories that no later step can draw; text, rewards and all else stay.
            From then on only steps after the oldest checkpoint can be audited and forked.
    """
    compact_shards(run, drop_payloads)


@flow(name="retention", persist_result=False)
def retention(root: str | None = None, drop_payloads: bool = False) -> None:
    """Do so for every run under a root. What is wrong with one does not keep it from the others.

    Args:
        root: Folder or s3:// URL for runs; the default root if not given.
        drop_payloads: As for `compact`, but of finished runs alone.
    """
    logger = get_run_logger()
    failed = compact_all(root or default_root(), drop_payloads=drop_payloads, tell=logger.info, warn=logger.warning)
    if failed:
        raise RunFailed(f"not compacted, for the reasons logged: {', '.join(failed)}")


@task(persist_result=False)
def compact_shards(run: str, drop_payloads: bool) -> None:
    get_run_logger().info(
        describe(compact_run(Run.open(resolve(run)), drop_payloads=drop_payloads), drop_payloads=drop_payloads)
    )
