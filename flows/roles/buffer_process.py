"""A trainer's replay buffer in a process of its own: `python -m flows.roles.buffer_process`, started by the trainer.

The process admits, draws and decodes the trajectories of the next gradient step while the trainer computes the current
one. In a single process the two would compete for Python's interpreter lock.

Orders arrive through one pipe and answers leave through another, as JSON plus raw arrays of numbers. The process ends
when the trainer ends, for whatever reason. It ignores signals to stop, because a trainer that is stopping may still
need it to write a sync record. It writes only the sync records that the trainer asks for, under the number of the
trainer's attempt.
"""

import argparse
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, BinaryIO

from storage.buffer.replay_buffer import DuckReplayBuffer
from storage.runs.events import Events
from storage.runs.run import Run
from tba.config import Config, parse
from tba.errors import RunFailed, error_named
from tba.fetched import Fetched, Lists
from tba.runtime.child import Child, end_with_parent, module_command, serve
from tba.runtime.messages import Numbers, take_pipes, widen
from tba.types import Draw

COMMAND = module_command("flows.roles.buffer_process")

_LISTS = (
    "prompt_tokens", "response_tokens", "ref_logps", "behaviour_logps", "loss_mask", "step_ends", "step_values",
)  # fmt: skip
"""Fields of `Fetched` that hold one list per row. Some of them may be None."""


def make_buffer(run: Run, config: Config, attempt: int, events: Events) -> DuckReplayBuffer:
    in_step = config.search.searchers if config.sync.lag is not None else None
    return DuckReplayBuffer(
        run, config, sampler_sql=run.sampler_sql, attempt=attempt, events=events, searchers_in_step=in_step
    )


# --- the trainer's side -----------------------------------------------------------------------------------------------


class BufferProcess(Child):
    """The `ReplayBuffer` of one attempt, in another process. Methods raise the errors of the buffer. They raise
    RunFailed if the process has died, or has not answered within `deadline` seconds and was killed."""

    def __init__(self, run: Run, attempt: int, life: int, *, deadline: float):
        command = [*COMMAND, "--run", run.url, "--attempt", str(attempt), "--life", str(life)]
        super().__init__("the process of the replay buffer", command)
        self.deadline = deadline
        self._lock = threading.Lock()
        for pipe in (self.stdin, self.stdout):
            widen(pipe)

    def close(self) -> None:
        super().close()
        self.stdout.close()

    def sync(self, sync: int, *, step: int) -> int:
        return self._ask("sync", sync, step=step)

    def replay(self, sync: int) -> None:
        self._ask("replay", sync)

    def recorded(self, sync: int) -> bool:
        return self._ask("recorded", sync)

    def ready(self, sync: int, *, step: int, until: int) -> bool:
        return self._ask("ready", sync, step=step, until=until)

    def waiting(self) -> int:
        return self._ask("waiting")

    def queues(self) -> dict[str, Any]:
        return self._ask("queues")

    def restore(self, queues: Mapping[str, Any]) -> None:
        self._ask("restore", dict(queues))

    def draw(self, step: int) -> list[Draw]:
        return [_draw(values) for values in self._ask("draw", step)]

    def fetch(self, draws: Sequence[Draw]) -> Fetched:
        return _fetched(*self._exchange("fetch", [_values(draw) for draw in draws]))

    def _ask(self, what: str, *arguments: Any, **options: Any) -> Any:
        return self._exchange(what, *arguments, **options)[0]

    def _exchange(self, what: str, *arguments: Any, **options: Any) -> tuple[Any, Numbers]:
        with self._lock, self.killed_after(self.deadline) as overdue:
            self.send({"do": what, "with": [arguments, options]})
            answer = self.receive()
        if answer is None:
            how = f"has not answered for {self.deadline:g} s" if overdue.is_set() else f"has died ({self.how_ended()})"
            raise RunFailed(f"{self.name} {how} after the order {what!r}")
        message, numbers = answer
        if "error" in message:
            raise error_named(message["error"], message["says"])
        return message["is"], numbers


# --- the buffer's side ------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None, open_run: Callable[[str], Run] = Run.open) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m flows.roles.buffer_process", description="The replay buffer of a trainer."
    )
    parser.add_argument("--run", required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--life", type=int, required=True)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    end_with_parent()

    def make() -> DuckReplayBuffer:
        run = open_run(options.run)
        return make_buffer(run, parse(run.config), options.attempt, Events(run, "trainer", options.life))

    serve_buffer(make, *take_pipes())


def serve_buffer(make: Callable[[], DuckReplayBuffer], orders: BinaryIO, answers: BinaryIO) -> None:
    the_buffer = cache(make)  # the first order makes the buffer, so that an error is the answer to this order

    def obey(what: str, said: Any, _: Numbers) -> tuple[Any, Numbers]:
        buffer = the_buffer()
        arguments, options = said
        if what == "fetch":
            return _fetch(buffer, *arguments)
        result = getattr(buffer, what)(*arguments, **options)
        return [_values(draw) for draw in result] if what == "draw" else result, ()

    serve(obey, orders, answers)


def _fetch(buffer: DuckReplayBuffer, draws: Sequence[Sequence[Any]]) -> tuple[Any, Numbers]:
    fetched = buffer.fetch([_draw(values) for values in draws])
    lists = {name: column for name in _LISTS if (column := getattr(fetched, name)) is not None}
    numbers = [fetched.reward_B, fetched.finished_B, *(array for it in lists.values() for array in it)]
    return [fetched.trajectory_ids, fetched.prompt_ids, list(lists)], numbers


# --- messages between the two -----------------------------------------------------------------------------------------


def _values(draw: Draw) -> list[Any]:
    """Return the values of a draw's fields. `dataclasses.astuple` would copy each value, which takes time."""
    return [getattr(draw, name) for name in Draw.__slots__]


def _draw(values: Sequence[Any]) -> Draw:
    return Draw(**dict(zip(Draw.__slots__, values, strict=True)))


def _fetched(answer: Sequence[Sequence[str]], numbers: Numbers) -> Fetched:
    reward_B, finished_B, *halves = numbers
    trajectory_ids, prompt_ids, names = answer
    return Fetched(
        trajectory_ids=trajectory_ids,
        prompt_ids=prompt_ids,
        reward_B=reward_B,
        finished_B=finished_B,
        **dict(zip(names, map(Lists, halves[::2], halves[1::2]), strict=True)),
    )


if __name__ == "__main__":
    main()
