"""A real role, started by tests in place of `flows.roles.role`. Its trainer takes no step beyond the number in the file
$HELD_AT, so that a test acts on a live run at the same step on every machine. If the run names no policy, the role is
script_role.py instead.
"""

import os
import sys
import time
from pathlib import Path

from flows.roles import role
from storage.runs.run import Run
from tba.batches.batching import Batch
from tests.support.flows import script_role


def hold() -> None:
    from tba.train.learner import Learned, Learner

    learn = Learner.learn

    def learn_once_it_may(learner: Learner, step: int, batch: Batch) -> Learned:
        while step > int(Path(os.environ["HELD_AT"]).read_text()):
            time.sleep(0.05)
        return learn(learner, step, batch)

    Learner.learn = learn_once_it_may


if __name__ == "__main__":
    if not Run.open(sys.argv[sys.argv.index("--run") + 1]).config["model"]["path"]:
        sys.exit(script_role.main())
    if "trainer" in sys.argv:
        hold()
    sys.exit(role.main())
