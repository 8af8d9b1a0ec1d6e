"""Events that a replay buffer writes: which shards it refuses or skips, and when it cannot follow a setting."""

from collections.abc import Collection, Mapping

from storage.log.sync_records import SyncRecord
from storage.runs.events import Events
from tba.types import Branch


class BufferEvents:
    """Writes events, and remembers them so that a lasting problem is reported only once."""

    def __init__(self, events: Events):
        self._events = events
        self._unread: set[str] = set()  # unreadable shards that an event has reported
        self._without_bounds: set[Branch] = set()  # branches that an event has reported as without a prompt in bounds

    def tell_what_is_left_out(self, record: SyncRecord, unread: Mapping[str, str]) -> None:
        """Report each shard that a sync record refuses. Also report, once per shard, the shards in `unread`, which
        could not be read and are neither admitted nor refused. Call this before the record is stored: after a crash in
        between, the events are written twice; in the other order they could be lost."""
        for refusal in record.refused:
            self._events.write(
                "shard-refused",
                f"{refusal.key}: {refusal.reason}",
                severity="error",
                sync=record.sync,
                key=refusal.key,
                reason=refusal.reason,
            )
        for key in sorted(unread.keys() - self._unread):
            message = f"skipped until it can be read: {unread[key]}"
            self._events.write("shard-unread", message, severity="warning", sync=record.sync, key=key)
            self._unread.add(key)

    def tell_of_an_empty_record(self, sync: int, newest: int | None) -> None:
        """Report that a sync record admits nothing. `newest` is the newest sync whose record admits anything."""
        since = "nothing has arrived yet" if newest is None else f"recent is still sync {newest}"
        self._events.write("empty-sync", f"sync {sync} admits nothing; {since}", severity="warning", sync=sync)

    def tell_of_bounds(self, sync: int, branches: set[Branch], bounds: tuple[float, float] | None) -> None:
        """Report which branches begin at this sync to ignore the bounds, because none of their prompts has a mean
        reward within the bounds."""
        before, self._without_bounds = self._without_bounds, branches
        for branch in sorted(branches - before):
            self._events.write(
                "no-prompt-within-bounds",
                f"sync {sync}: no {branch} prompt has a mean reward within sampling.mean_reward_between "
                f"{list(bounds or ())}; all {branch} prompts are drawn until one has",
                severity="warning",
                sync=sync,
                branch=branch,
            )

    def tell_of_restarted_queues(self, given_up: Collection[str]) -> None:
        """Report that every prompt can be drawn again, because retention records gave up shards after the queues were
        stored."""
        self._events.write(
            "queues-restarted",
            f"shards were given up since the checkpoint was stored, so every prompt can be drawn again; "
            f"the first shards that were ever given up: {', '.join(sorted(given_up)[:3])}",
            severity="warning",
        )
