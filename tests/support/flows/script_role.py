"""A role that only follows a script: a real process with a real lease, started by tests in place of `flows.roles.role`.

    python -m tests.support.flows.script_role {searcher|trainer|evaluator} --run URL --index 0

A file in the folder `behaviour` of the run, named after the role or its kind, says in one word what the role does.
`fail`, `misuse` and `in-vain` exit at once. `hang` stops renewing the lease, and `stuck` renews it but does nothing.
`stubborn` ignores requests to stop. `needs N` says that it needs N seconds to stop, and does not stop while the file
says so. `leave` exits as if asked to stop, and `superseded` as if another life had taken over. `turn` fails at its
tenth turn, `warn` writes a warning at its tenth turn, and `finish` finishes. Otherwise the role works until it is asked
to stop; trainer and evaluator finish once a file `finish` exists.

A run that names a policy gets the real role.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from storage.runs.events import Events
from storage.runs.held_lease import HeldLease
from storage.runs.run import Run
from storage.weights.evaluations import Evaluations
from storage.weights.versions import Versions
from tba.errors import Stopped, Superseded
from tba.types import Score, Version

AT_ONCE = {"fail": 1, "misuse": 2, "in-vain": 5}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("--run")
    parser.add_argument("--index", type=int)
    options = parser.parse_args()
    run = Run.open(options.run)
    config = run.config  # parsing it would take as long as all else that a script does
    if config["model"]["path"]:
        os.execv(sys.executable, [sys.executable, "-m", "flows.roles.role", *sys.argv[1:]])
    name = f"searcher-{options.index:03d}" if options.kind == "searcher" else options.kind
    print(f"{name} begins as {os.getpid()}", flush=True)
    behaviour = read_behaviour(run, name, options.kind)
    if behaviour in AT_ONCE:
        print("2026-01-01 00:00:00,000 tba ERROR there is no such model\nbye", flush=True)
        return AT_ONCE[behaviour]
    limits = config["limits"]
    number = options.index if options.kind == "searcher" else None
    with HeldLease(run, name, every=limits["lease_every"], orphan_after=limits["orphan_after"], index=number) as lease:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else lambda *_: lease.stop("SIGTERM"))
        return live(run, name, options.kind, lease)


def live(run: Run, name: str, kind: str, lease: HeldLease) -> int:
    for turn in range(1_000_000):
        behaviour = read_behaviour(run, name, kind)
        if needs := behaviour.removeprefix("needs ") if behaviour.startswith("needs") else "":
            lease.tell("turn that takes long", step=0, seconds_to_stop=float(needs))
        else:
            lease.tell(f"turn {turn}", step=turn)
        if behaviour == "turn" and turn == 10:
            return 1
        if behaviour == "warn" and turn == 10:
            Events(run, name, lease.life).write("step-skipped", "step 3 is not finite", severity="warning")
        if behaviour == "stuck":
            time.sleep(600)
        if behaviour == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        if behaviour in ("leave", "superseded"):
            return 4 if behaviour == "leave" else 3
        if behaviour == "finish" or (kind != "searcher" and (Path(run.url) / "finish").exists()):
            publish(run) if kind == "trainer" else score(run)
            lease.close("finished")
            return 0
        try:
            lease.check()
        except Stopped:
            if behaviour != "stubborn" and not needs:
                return 4
        except Superseded:
            return 3
        time.sleep(0.05)
    return 1


def publish(run: Run) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "model.safetensors").write_bytes(bytes(1000))
        Versions(run).publish(Version(1, 1), step=4, folder=Path(folder), weights_sha256="")


def score(run: Run) -> None:
    while (newest := Versions(run).newest()) is None:
        time.sleep(0.05)
    Evaluations(run).write([Score(version=newest, step=4, metric="greedy", value=0.75, n=8, seconds=0.1)])


def read_behaviour(run: Run, name: str, kind: str) -> str:
    for file in (name, kind):
        path = Path(run.url) / "behaviour" / file
        if path.exists():
            return path.read_text().strip()
    return "work"


if __name__ == "__main__":
    sys.exit(main())
