"""Events that a replay buffer writes: what it refuses, passes over or cannot keep to."""

from collections.abc import Collection, Mapping

from storage.log.syncs import SyncRecord
from storage.runs.events import Events
from tba.types import Branch


class BufferEvents:
    """Remembers what has been told, so that the same trouble is told once."""

    def __init__(self, events: Events):
        self._events = events
        self._unread: set[str] = set()  # shards that could not be read and that an event speaks of
        self._without_bounds: set[Branch] = set()  # branches that an event says have no prompt within them

    def tell_what_is_left_out(self, record: SyncRecord, unread: Mapping[str, str]) -> None:
        """Tell what a record refuses, before it is stored: a crash in between has it told again, the other way round it
        would never be. And, once, what could not be read and so is neither in it nor refused."""
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
            message = f"passed over for now: {unread[key]}"
            self._events.write("shard-unread", message, severity="warning", sync=record.sync, key=key)
            self._unread.add(key)

    def tell_of_an_empty_record(self, sync: int, newest: int | None) -> None:
        """Tell that a record admits nothing; `newest` is the newest one that admits anything."""
        since = "nothing has arrived yet" if newest is None else f"recent is still sync {newest}"
        self._events.write("empty-sync", f"sync {sync} admits nothing; {since}", severity="warning", sync=sync)

    def tell_of_bounds(self, sync: int, branches: set[Branch], bounds: tuple[float, float] | None) -> None:
        """Tell which branches begin to draw from all of their prompts, as none is within the bounds on mean rewards."""
        before, self._without_bounds = self._without_bounds, branches
        for branch in sorted(branches - before):
            self._events.write(
                "no-prompt-within-bounds",
                f"sync {sync}: no {branch} prompt has a mean reward within sampling.mean_reward_between "
                f"{list(bounds or ())}; all {branch} ones are drawn until one has",
                severity="warning",
                sync=sync,
                branch=branch,
            )

    def tell_of_restarted_queues(self, given_up: Collection[str]) -> None:
        """Tell that every prompt can be drawn again, since shards were given up after the queues were stored."""
        self._events.write(
            "queues-restarted",
            f"shards were given up since the checkpoint was stored ({', '.join(sorted(given_up)[:3])} and the "
            "like): every prompt can be drawn again",
            severity="warning",
        )
