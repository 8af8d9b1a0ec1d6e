"""Spread a trainer over several ranks. Rank 0 leads: it is the trainer. The other ranks follow the orders that rank 0
sends them (tba/distributed/orders.py).

Weights, gradients, orders, batches and outcomes travel through torch's process group. No rank reads what another rank
has written to a disk: each reads its checkpoint itself, and stores its part of a checkpoint itself.
"""

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tba.batches.batching import Batch
from tba.config import Config
from tba.distributed.followers import Followers, part_key
from tba.distributed.heartbeats import Heartbeats
from tba.distributed.orders import END, Order, answer, next_order
from tba.models.adapters import AdapterSnapshot
from tba.models.policy import Policy, Snapshot
from tba.runtime.background import Background
from tba.runtime.child import END_PATIENCE
from tba.runtime.messages import Numbers
from tba.train.learner import Learned, Learner
from tba.train.training_state import TrainingState
from tba.types import Outcome

log = logging.getLogger(__name__)


class LeadingLearner(Learner):
    """The learner of rank 0. Every rank carries out each call with its own part of the model and of the batch."""

    def __init__(self, config: Config, policy: Policy, followers: Followers):
        super().__init__(config, policy, followers.ranks)
        self.followers = followers

    def restore(self, state: TrainingState) -> None:
        """Continue from a checkpoint. The other ranks read their own parts of it."""
        self.followers.together("restore", partial(super().restore, state))

    def learn(self, step: int, batch: Batch) -> Learned:
        values, numbers = batch_values(batch)
        learn = partial(super().learn, step, batch)
        mine, *theirs = self.followers.together("learn", learn, [step, values], numbers)
        outcomes = [*mine.outcomes, *(Outcome(**fields_) for answer in theirs for fields_ in answer)]
        return replace(mine, outcomes=sorted(outcomes, key=lambda outcome: (outcome.slot, outcome.position)))

    def snapshot(self) -> Snapshot | AdapterSnapshot:
        return self.followers.together("snapshot", super().snapshot)[0]

    def state(self, *, step: int, sync: int) -> TrainingState:
        """Return the state of rank 0. The other ranks store their states themselves, and `TrainingState.others` waits
        until they have done so."""
        state = partial(super().state, step=step, sync=sync)

        def others() -> list[Mapping[str, Any]]:
            return [part for part in self.followers.stored_parts(str(sync)) if part]

        return replace(self.followers.together("state", state, [step, sync])[0], others=others)


@dataclass(frozen=True)
class Follower:
    """A rank other than 0. It makes its learner from the order `begin`, and carries out all later orders with it."""

    make: Callable[[Order], Learner]
    load: Callable[[], TrainingState]  # reads this rank's part of the checkpoint that the attempt continues
    store: Callable[[TrainingState], Mapping[str, Any]]  # stores this rank's part of a checkpoint; see `stored_parts`

    def run(self, store: dist.TCPStore, heartbeats: Heartbeats, *, silent_after: float) -> None:
        """Carry out orders until there are no more. If this fails, report the error to rank 0 and raise it. If rank 0
        is lost, end the process."""
        writing, learners, done = Background("state"), list[Learner](), threading.Event()
        rank = heartbeats.rank
        heartbeats.count_anew()
        ending = partial(_end_without_rank_0, heartbeats, done, silent_after)
        threading.Thread(target=ending, name="rank-0", daemon=True).start()

        def begin(order: Order) -> None:
            learners.append(self.make(order))

        def restore(order: Order) -> None:
            learners[-1].restore(self.load())

        def learn(order: Order) -> Any:
            step, values = order.said
            batch = batch_of(values, order.numbers, learners[-1].policy.device)
            outcomes = learners[-1].learn(step, batch).outcomes
            return [{name: getattr(outcome, name) for name in Outcome.__slots__} for outcome in outcomes]

        def snapshot(order: Order) -> None:
            learners[-1].snapshot()

        def state(order: Order) -> None:
            step, sync = order.said
            writing.make_room()
            training_state = learners[-1].state(step=step, sync=sync)
            writing.submit(lambda: keep(training_state, sync))

        def keep(training_state: TrainingState, sync: int) -> None:
            """Store this rank's part, if it stores any. If this fails, report the error and end the process: rank 0
            waits for the part, and may send no further order that could be answered with the error."""
            try:
                part = self.store(training_state) if training_state.ranks.stores else None
                store.set(part_key(str(sync), rank), json.dumps(part))
            except Exception as error:
                log.exception("the state of the optimizer cannot be stored")
                heartbeats.report(error)
                os._exit(1)

        obeying = {"begin": begin, "restore": restore, "learn": learn, "snapshot": snapshot, "state": state}
        try:
            with heartbeats.reporting():
                while (order := next_order()).what != END:
                    answer(obeying[order.what](order))
                writing.finish()
        finally:
            done.set()


def _end_without_rank_0(heartbeats: Heartbeats, done: threading.Event, silent_after: float) -> None:
    """End the process if rank 0 is lost and this rank does not notice it by itself, because it waits for rank 0 in the
    process group. A silence that ends in time is forgiven."""

    def why_lost() -> str:
        if heartbeats.cut:
            return "has ended"
        silence = heartbeats.silence(0)
        return f"has given no sign of life for {silence:.0f} s" if silence > silent_after else ""

    while not done.wait(1.0):
        if why_lost() and not done.wait(END_PATIENCE) and (why := why_lost()):
            log.error("rank 0 of the trainer %s", why)
            os._exit(1)


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


def files_as_numbers(folder: Path) -> tuple[list[str], list[np.ndarray]]:
    """Return the names and the bytes of the files of a small folder, as an order carries them."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [path.relative_to(folder).as_posix() for path in files]
    return names, [np.frombuffer(path.read_bytes(), np.uint8) for path in files]


def write_files(names: list[str], numbers: Numbers, folder: Path) -> None:
    for name, content in zip(names, numbers, strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.tobytes())
