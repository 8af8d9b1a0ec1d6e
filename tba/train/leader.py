"""Spread a trainer over several ranks. Rank 0 leads: it is the trainer, and it alone uses storage. The other ranks
follow the orders that rank 0 sends them through pipes.

Weights, gradients and sums travel between ranks through torch's process group, which has a timeout. Orders, batches and
the outcomes that each rank computes travel through the pipes, which have no timeout, so that a rank may wait long for
its next order.
"""

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import mkdtemp
from typing import Any, BinaryIO, Self

import numpy as np
import torch
from torch import Tensor

from tba.batches.batching import Batch
from tba.config import Config
from tba.distributed.ranks import PATIENCE, Ranks
from tba.errors import RunFailed, TBAError, error_named
from tba.models.policy import Policy, Snapshot
from tba.runtime.background import Background
from tba.runtime.child import END_PATIENCE, Child, serve, tell_error
from tba.runtime.messages import Numbers, widen
from tba.runtime.waiting import looks
from tba.train.learner import Learned, Learner
from tba.train.training_state import TrainingState
from tba.types import Outcome

log = logging.getLogger(__name__)

START = 600.0  # seconds for a rank to read or answer an order; the first order includes imports, on a busy machine


class Follower(Child):
    """A rank other than 0, which runs as a child of this process. A thread receives the rank's answers, and so notices
    at once when the rank ends."""

    def __init__(self, rank: int, command: Sequence[str]):
        super().__init__(f"rank {rank} of the trainer", command)
        self.answers: SimpleQueue[Any] = SimpleQueue()  # the last entry is None, once the rank has ended
        self.ended = threading.Event()
        self.missed = threading.Event()  # set once a caller has received an error in place of an answer
        widen(self.stdin)
        threading.Thread(target=self._listen, name=f"rank-{rank}", daemon=True).start()

    def order(self, what: str, said: Any = None, numbers: Numbers = ()) -> None:
        """Send an order, and wait until the rank has read most of it. A rank that does not read the order in time is
        killed, so that this call cannot wait forever."""
        with self.killed_after(START):
            self.send({"do": what, "with": said}, numbers)

    def answer(self, patience: float) -> Any:
        """Return the rank's answer. If the rank reports an error instead, raise this error. Raise RunFailed if the rank
        has died, or does not answer within `patience` seconds."""
        try:
            answer = self.answers.get(timeout=patience)
        except Empty:
            raise RunFailed(f"{self.name} has not answered for {patience:g} s") from None
        if answer is None or "error" in answer:
            self.missed.set()
        if answer is None:
            self.answers.put(None)
            raise RunFailed(f"{self.name} has died ({self.how_ended()})")
        if "error" in answer:
            error = error_named(answer["error"], answer["says"])
            raise error if isinstance(error, TBAError) else RunFailed(f"{self.name}: {error}")
        return answer["is"]

    def why_ended(self) -> str:
        """Return the error with which a rank has ended. Earlier answers that nobody has read are skipped."""
        while True:
            try:
                self.answer(END_PATIENCE)
            except Exception as error:
                return str(error)

    def _listen(self) -> None:
        with self.stdout:
            while (message := self.receive()) is not None:
                self.answers.put(message[0])
        self.answers.put(None)
        self.ended.set()


class Followers:
    """All ranks except rank 0. If one of them dies while rank 0 waits for it in the process group, rank 0 may wait
    forever. The process of rank 0 is therefore ended. If rank 0 has noticed the death, it first gets time to store the
    syncs that were closed before."""

    def __init__(self, command: Sequence[str], size: int, *, grace: float = 3 * END_PATIENCE):
        self.size, self.grace = size, grace
        self.all = [Follower(rank, [*command, str(rank)]) for rank in range(1, size)]
        self.leaving, self.closing = threading.Event(), threading.Event()
        threading.Thread(target=self._watch, name="ranks", daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        for follower in self.all:
            follower.close()

    def release(self) -> None:
        """Let all ranks end. Call this before rank 0 leaves the process group: a rank may have to wait there until the
        other ranks leave too."""
        self.leaving.set()
        for follower in self.all:
            follower.release()

    def order(self, what: str, said: Any = None, numbers: Numbers = ()) -> None:
        for follower in self.all:
            if follower.ended.is_set():
                follower.answer(END_PATIENCE)
            follower.order(what, said, numbers)

    def answers(self, patience: float = START) -> list[Any]:
        return [follower.answer(patience) for follower in self.all]

    def together(self, what: str, mine: Callable[[], Any], said: Any = None, numbers: Numbers = ()) -> list[Any]:
        """Carry out an order in all ranks at once. Return the result of this rank, followed by the answers of the other
        ranks."""
        self.order(what, said, numbers)
        try:
            result = mine()
        except Exception as error:
            if not isinstance(error, TBAError):  # most likely caused by another rank, whose error says more
                self._hear_of_an_end()
            raise
        return [result, *self.answers()]

    def _hear_of_an_end(self) -> None:
        """Wait a few seconds for another rank to end, and raise the error of that rank."""
        for _ in looks(END_PATIENCE):
            for follower in self.all:
                if follower.ended.is_set():
                    follower.answer(END_PATIENCE)

    def _watch(self) -> None:
        while not self.closing.wait(1.0):
            if dead := [follower for follower in self.all if follower.ended.is_set()]:
                ended = self.closing.wait(self.grace)
                if not ended and any(follower.missed.is_set() for follower in dead):
                    self.leaving.wait(PATIENCE.total_seconds())
                    ended = self.closing.wait(self.grace)
                if not ended:
                    log.error("%s; rank 0 did not stop by itself within %g s", dead[0].why_ended(), self.grace)
                    os._exit(1)
                return


class LeadingLearner(Learner):
    """The learner of rank 0. Every rank carries out each call with its own part of the model and of the batch."""

    def __init__(
        self,
        config: Config,
        policy: Policy,
        ranks: Ranks,
        *,
        followers: Followers,
        scratch: Path,
        checkpoint: Path | None = None,
    ):
        super().__init__(config, policy, ranks)
        self.followers, self.scratch, self.checkpoint = followers, scratch, checkpoint

    def restore(self, state: TrainingState) -> None:
        """Continue from a checkpoint. The other ranks read their own parts of it."""
        self.followers.together("restore", partial(super().restore, state), str(self.checkpoint))

    def learn(self, step: int, batch: Batch) -> Learned:
        values, numbers = batch_values(batch)
        learn = partial(super().learn, step, batch)
        mine, *theirs = self.followers.together("learn", learn, [step, values], numbers)
        outcomes = [*mine.outcomes, *(Outcome(**fields_) for answer in theirs for fields_ in answer)]
        return replace(mine, outcomes=sorted(outcomes, key=lambda outcome: (outcome.slot, outcome.position)))

    def snapshot(self) -> Snapshot:
        return self.followers.together("snapshot", super().snapshot)[0]

    def state(self, *, step: int, sync: int) -> TrainingState:
        """Return the state of rank 0. The other ranks write their states into the folder `others`, and
        `TrainingState.save` waits for these files."""
        folder = Path(mkdtemp(dir=self.scratch))
        state = partial(super().state, step=step, sync=sync)
        return replace(self.followers.together("state", state, [step, sync, str(folder)])[0], others=folder)


def follow(begin: Callable[[Any], Learner], orders: BinaryIO, answers: BinaryIO) -> None:
    """Run a rank other than 0: carry out orders until there are no more. The first order is `begin`."""
    writing, learners = Background("state"), list[Learner]()

    def start(said: Any, numbers: Numbers) -> None:
        learners.append(begin(said))

    def restore(said: Any, numbers: Numbers) -> None:
        learners[-1].restore(TrainingState.load(Path(said), learners[-1].ranks))

    def learn(said: Any, numbers: Numbers) -> Any:
        step, values = said
        learned = learners[-1].learn(step, batch_of(values, numbers, learners[-1].policy.device))
        return [{name: getattr(outcome, name) for name in Outcome.__slots__} for outcome in learned.outcomes]

    def snapshot(said: Any, numbers: Numbers) -> None:
        learners[-1].snapshot()

    def state(said: Any, numbers: Numbers) -> None:
        step, sync, folder = said
        writing.make_room()
        training_state = learners[-1].state(step=step, sync=sync)
        writing.submit(lambda: write(training_state, Path(folder)))

    def write(training_state: TrainingState, folder: Path) -> None:
        """Write this rank's file. If this fails, report the error and end the process: rank 0 waits for the file, and
        may send no further order that could be answered with the error."""
        try:
            training_state.save_optimizer(folder)
        except Exception as error:
            log.exception("the state of the optimizer cannot be written")
            tell_error(answers, error)
            os._exit(1)

    obeying = {"begin": start, "restore": restore, "learn": learn, "snapshot": snapshot, "state": state}

    def obey(what: str, said: Any, numbers: Numbers) -> tuple[Any, Numbers]:
        return obeying[what](said, numbers), ()

    serve(obey, orders, answers, ends_at_error=True)  # after an error, the ranks are out of step
    writing.finish()


def batch_values(batch: Batch) -> tuple[Any, list[np.ndarray]]:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    plain = {name: value for name, value in values.items() if name not in tensors}
    return [list(tensors), plain], [tensor.cpu().numpy() for tensor in tensors.values()]


def batch_of(values: Any, numbers: Numbers, device: torch.device) -> Batch:
    names, plain = values
    by_name: dict[str, Any] = {**plain, "lengths": tuple(plain["lengths"])}
    by_name |= {name: torch.tensor(array, device=device) for name, array in zip(names, numbers, strict=True)}
    return Batch(**by_name)
