"""A trainer's replay buffer in a process of its own: `python -m flows.roles.buffer_process`, started by the trainer.

The process admits, draws and decodes the trajectories of the next gradient step while the trainer computes the current
one. In a single process the two would compete for Python's interpreter lock.

Orders arrive through one pipe and answers leave through another, as JSON plus raw arrays of numbers. The process ends
when the trainer ends, for whatever reason. It ignores signals to stop, because a trainer that stops in order may still
need a record. It writes only the records that the trainer asks for, under the number of the trainer's attempt.
"""

import argparse
import logging
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, Self

from storage.buffer.replay_buffer import DuckReplayBuffer
from storage.runs.events import Events
from storage.runs.run import Run
from tba.config import Config, parse
from tba.errors import RunFailed, TBAError, error_named
from tba.fetched import Fetched, Lists
from tba.runtime.child import end_with_parent, start_child
from tba.runtime.messages import Numbers, receive, send, take_pipes, widen
from tba.types import Draw

COMMAND = [sys.executable, "-P", "-m", "flows.roles.buffer_process"]

_PATIENCE = 10.0  # seconds that the process has to end when it is no longer needed

_LISTS = (
    "prompt_tokens", "response_tokens", "ref_logps", "behaviour_logps", "loss_mask", "step_ends", "step_values",
)  # fmt: skip
"""Fields of `Fetched` that hold one list per row. Some of them may be None."""


def make_buffer(run: Run, config: Config, attempt: int, events: Events) -> DuckReplayBuffer:
    return DuckReplayBuffer(
        run,
        seed=config.seed,
        sampling=config.sampling,
        training=config.training,
        limits=config.limits,
        objective=config.objective,
        sampler_sql=run.sampler_sql,
        attempt=attempt,
        events=events,
        searchers_in_step=config.search.searchers if config.sync.lag is not None else None,
    )


# --- the trainer's side -----------------------------------------------------------------------------------------------


class Reader:
    """The `ReplayBuffer` of one attempt, in another process. Methods raise the errors of the buffer. They raise
    RunFailed if the process has died, or if it has been killed because it did not answer within `deadline` seconds."""

    def __init__(self, run: Run, attempt: int, life: int, *, deadline: float):
        self.deadline = deadline
        command = [*COMMAND, "--run", run.url, "--attempt", str(attempt), "--life", str(life)]
        self.process = start_child(command)
        self._lock = threading.Lock()
        for pipe in (self.process.stdin, self.process.stdout):
            widen(pipe)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin and self.process.stdout
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()

    def sync(self, sync: int, *, step: int) -> int:
        return self._ask("sync", sync, step)

    def replay(self, sync: int) -> None:
        self._ask("replay", sync)

    def recorded(self, sync: int) -> bool:
        return self._ask("recorded", sync)

    def ready(self, sync: int, *, step: int, until: int) -> bool:
        return self._ask("ready", sync, step, until)

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

    def _ask(self, what: str, *arguments: Any) -> Any:
        return self._exchange(what, *arguments)[0]

    def _exchange(self, what: str, *arguments: Any) -> tuple[Any, Numbers]:
        assert self.process.stdin and self.process.stdout
        with self._lock, self._overdue() as overdue:
            try:
                send(self.process.stdin, {"do": what, "with": arguments})
                answer = receive(self.process.stdout)
            except BrokenPipeError:
                answer = None
        if answer is None:
            how = f"has not answered for {self.deadline:g} s" if overdue.is_set() else f"has died ({self._end()})"
            raise RunFailed(f"the trainer's reader (pid {self.process.pid}) {how}, asked to {what}")
        message, numbers = answer
        if "error" in message:
            raise error_named(message["error"], message["says"])
        return message["is"], numbers

    @contextmanager
    def _overdue(self) -> Iterator[threading.Event]:
        """Yield an event. Once the deadline has passed, set the event and kill the process."""
        passed = threading.Event()

        def end() -> None:
            passed.set()
            self.process.kill()

        timer = threading.Timer(self.deadline, end)
        timer.daemon = True
        timer.start()
        try:
            yield passed
        finally:
            timer.cancel()

    def _end(self) -> str:
        try:
            code = self.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            return "it has not ended"
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"


# --- the reader's side ------------------------------------------------------------------------------------------------


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

    serve(make, *take_pipes())


def serve(make: Callable[[], DuckReplayBuffer], orders: BinaryIO, answers: BinaryIO) -> None:
    buffer: DuckReplayBuffer | None = None
    while (order := receive(orders)) is not None:
        what, arguments = order[0]["do"], order[0]["with"]
        numbers: Numbers = ()
        try:
            buffer = buffer or make()  # here, so that its errors become the answer to the first order
            result, numbers = _ORDERS[what](buffer, *arguments)
            answer = {"is": result}
        except TBAError as error:
            answer = {"error": type(error).__name__, "says": str(error)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": type(error).__name__, "says": str(error)}
        try:
            send(answers, answer, numbers)
        except BrokenPipeError:
            return


def _fetch(buffer: DuckReplayBuffer, draws: Sequence[Sequence[Any]]) -> tuple[Any, Numbers]:
    fetched = buffer.fetch([_draw(values) for values in draws])
    lists = {name: column for name in _LISTS if (column := getattr(fetched, name)) is not None}
    numbers = [fetched.reward_B, fetched.finished_B, *(array for it in lists.values() for array in it)]
    return [fetched.trajectory_ids, fetched.prompt_ids, list(lists)], numbers


_ORDERS: Mapping[str, Callable[..., tuple[Any, Numbers]]] = {
    "sync": lambda buffer, sync, step: (buffer.sync(sync, step=step), ()),
    "replay": lambda buffer, sync: (buffer.replay(sync), ()),
    "recorded": lambda buffer, sync: (buffer.recorded(sync), ()),
    "ready": lambda buffer, sync, step, until: (buffer.ready(sync, step=step, until=until), ()),
    "waiting": lambda buffer: (buffer.waiting(), ()),
    "queues": lambda buffer: (buffer.queues(), ()),
    "restore": lambda buffer, queues: (buffer.restore(queues), ()),
    "draw": lambda buffer, step: ([_values(draw) for draw in buffer.draw(step)], ()),
    "fetch": _fetch,
}


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
