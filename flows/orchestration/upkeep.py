"""The flows `compact` and `retention`. Run them now and then, or on a schedule; runs may go on meanwhile.

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
    """Merge the shards of a run into a few large objects.

    Args:
        run: URL of the run, or its name under the default root.
        drop_payloads: Delete the tokens of trajectories that no later step can draw; text, rewards and everything else
            stay. After that, only steps after the oldest checkpoint can be audited and forked.
    """
    compact_shards(run, drop_payloads)


@flow(name="retention", persist_result=False)
def retention(root: str | None = None, drop_payloads: bool = False) -> None:
    """Merge the shards of every run under a root. A problem with one run does not stop the others.

    Args:
        root: Folder or s3:// URL with runs; the default root if not given.
        drop_payloads: As for `compact`, but only for finished runs.
    """
    logger = get_run_logger()
    failed = compact_all(root or default_root(), drop_payloads=drop_payloads, tell=logger.info, warn=logger.warning)
    if failed:
        raise RunFailed(f"runs that could not be compacted, see the log for reasons: {', '.join(failed)}")


@task(persist_result=False)
def compact_shards(run: str, drop_payloads: bool) -> None:
    get_run_logger().info(
        describe(compact_run(Run.open(resolve(run)), drop_payloads=drop_payloads), drop_payloads=drop_payloads)
    )
