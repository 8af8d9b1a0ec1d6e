"""A real role, started by tests in place of `flows.roles.role`. Its trainer takes no step beyond the number in the file
$HELD_AT, so that a test acts on a live run at the same step on every machine. Its searchers pause after each round, so
that they leave the processor to others while the trainer is held. If the run names no policy, the role is
script_role.py instead.
"""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from flows.roles import role
from storage.log.trajectories import Trajectories
from storage.runs.run import Run
from tba.batches.batching import Batch
from tba.types import Trajectory
from tests.support.flows import script_role

PAUSE = 0.5  # seconds after each round of a searcher


def hold_trainer() -> None:
    from tba.train.learner import Learned, Learner

    learn = Learner.learn

    def learn_once_it_may(learner: Learner, step: int, batch: Batch) -> Learned:
        while step > int(Path(os.environ["HELD_AT"]).read_text()):
            time.sleep(0.05)
        return learn(learner, step, batch)

    Learner.learn = learn_once_it_may


def slow_down_searcher() -> None:
    append = Trajectories.append

    def append_and_pause(log: Trajectories, searcher: int, seq: int, rows: Sequence[Trajectory]) -> str:
        appended = append(log, searcher, seq, rows)
        time.sleep(PAUSE)
        return appended

    Trajectories.append = append_and_pause


if __name__ == "__main__":
    if not Run.open(sys.argv[sys.argv.index("--run") + 1]).config["model"]["path"]:
        sys.exit(script_role.main())
    if "trainer" in sys.argv:
        hold_trainer()
    elif "searcher" in sys.argv:
        slow_down_searcher()
    sys.exit(role.main())
