"""Run for hours with kills, changes of scale and a store that fails: does anything grow, slow down or get lost?

    python -m benchmarks.soak [--minutes 60] [--quiet 0.5] [--every 20] [--seed 0] [--out FOLDER]

`tba run` trains quickstart's policy in small steps, with trainer, searchers and evaluator as processes, on an S3 server
(Ceph's gateway if it is installed, else a simulation) behind a proxy. Disturbances come at random times, every
`--every` seconds on average. A role or the supervisor is killed by SIGKILL; `tba resume` then restarts the supervisor.
The number of searchers is set to one from 1 to 4. For some seconds, one request in ten fails in one of many ways, or
the store accepts no connections. In the last part of the time, the share `--quiet`, no process is killed, so that each
lives long enough to show what grows. Every two seconds, the private memory, files and threads of the supervisor and of
each role are measured; those of a role include its child processes.

At the end, `tba stop` stops the run. `tba check` must find no problem, and every step must exist exactly once. The
times of steps, from `tba sql`'s views, show whether steps became slower.
"""

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import psutil

import storage
from benchmarks.harness import servers
from benchmarks.harness.faulty_proxy import Fault, Operation, Proxy, faulty
from benchmarks.harness.hardware import hardware
from storage.maintenance.check import check
from storage.runs.leases import Lease, read_leases
from storage.runs.run import Run
from tba.errors import TBAError

SETTINGS = {
    "training.steps": 1_000_000,
    "training.schedule": "constant",
    "training.prompts_per_step": 4,
    "training.groups_per_micro_batch": 4,
    "search.prompts_per_round": 16,
    "search.initial_fill": 256,
    "sync.checkpoint_every": 10,
    "sync.keep_versions": 4,
    "evaluation.every": 100,
    "evaluation.prompts": 50,
    "limits.memory_gb": 0.05,  # soon full, so that later growth has another cause
    "limits.disk_gb": 0.5,
    "limits.max_restarts": 1000,
    "limits.stop_grace": 60,
}
MOST_SEARCHERS = 4
LOOK_EVERY = 2.0
SETTLED = 60.0  # seconds after which the memory of a process has settled
TROUBLE = 12.0  # seconds for which requests fail
ABSENCE = 6.0  # seconds for which the store accepts no connections
RATE = 0.1
HARMLESS = ("pass", "silent", "late")  # the last two block a request until its client gives up
FAULTS: list[Fault] = [fault for fault in get_args(Fault) if fault not in HARMLESS]
STEPS = """
select seconds_step - seconds_wait - coalesce(seconds_backlog, 0) as seconds, seconds - seconds_forward_backward
from steps order by step
"""
TOTALS = """
select
    (select count(*) from steps), (select count(distinct step) from steps), (select max(step) from steps),
    (select count(*) from trajectories), (select count(*) - count(distinct trajectory_id) from trajectories),
    (select count(*) from draws), (select max(attempt) from attempts)
"""


@dataclass(frozen=True)
class Measurement:
    """A measurement of one process and its child processes."""

    at: float
    age: float
    megabytes: float
    files: int
    threads: int


@dataclass
class Seen:
    """All measurements by role and process, and the number of disturbances of each kind."""

    lives: dict[tuple[str, int], list[Measurement]] = field(default_factory=lambda: defaultdict(list))
    done: Counter[str] = field(default_factory=Counter)
    met: Counter[str] = field(default_factory=Counter)


class Soak:
    def __init__(self, root: str, direct: Mapping[str, str], folder: Path, proxy: Proxy, seed: int):
        self.root, self.folder, self.proxy = root, folder, proxy
        self.direct = direct  # how this process reaches the store, without faults
        self.random = random.Random(seed)
        self.seen = Seen()
        self.supervisor: subprocess.Popen[bytes] | None = None
        self.stopping = threading.Event()

    @property
    def run(self) -> Run:
        return Run.open(f"{self.root}/runs/soak")

    # --- the run ------------------------------------------------------------------------------------------------------

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "flows.cli", *arguments]

    def environment(self) -> dict[str, str]:
        through = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.proxy.port}", "TBA_CACHE": str(self.folder / "cache")}
        return {**os.environ, **self.direct, **through, "TBA_ROOT": self.root, "OMP_NUM_THREADS": "1"}

    def start(self) -> None:
        settings = [f"{name}={value}" for name, value in SETTINGS.items()]
        self._spawn(self.command("run", "quickstart", "--name", "soak", "--set", *settings))
        self._await("first steps", lambda: self._step() >= 20, 1200.0)  # the run makes its base policy first

    def resume(self) -> None:
        self._spawn(self.command("resume", "soak"))

    def _spawn(self, command: Sequence[str]) -> None:
        with (self.folder / "supervisor.log").open("ab") as log:
            self.supervisor = subprocess.Popen(
                command,
                env=self.environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _step(self) -> int:
        with suppress(TBAError):
            return max((int(it.progress.get("step", 0)) for it in self.leases() if it.role == "trainer"), default=0)
        return 0

    def _await(self, what: str, condition: Any, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or (self.supervisor and self.supervisor.poll() is not None):
                raise SystemExit(f"no {what} within {seconds:.0f} s:\n{(self.folder / 'supervisor.log').read_text()}")
            time.sleep(1.0)

    def leases(self) -> list[Lease]:
        return read_leases(self.run)

    def end(self) -> None:
        """Stop the run. Kill the supervisor if it does not end in time, and count this."""
        self.proxy.recover()
        if self.supervisor and self.supervisor.poll() is not None:
            self.resume()
            time.sleep(20.0)
        said = subprocess.run(self.command("stop", "soak"), env=self.environment(), capture_output=True, text=True)
        print(said.stdout or said.stderr, flush=True)
        assert self.supervisor
        try:
            self.supervisor.wait(180)
        except subprocess.TimeoutExpired:
            self.seen.done["did not stop"] += 1
            self.supervisor.kill()

    def abandon(self) -> None:
        """Kill all processes of the run that are left."""
        if self.supervisor and self.supervisor.poll() is None:
            self.supervisor.kill()
            self.supervisor.wait()
        with suppress(TBAError):
            for lease in self.leases():
                with suppress(ProcessLookupError):
                    os.killpg(lease.pid, signal.SIGKILL)

    # --- disturbances -------------------------------------------------------------------------------------------------

    def disturb(self, *, may_kill: bool) -> None:
        kinds = ["scale", "faults", "faults", "absence"] + (["kill"] * 4 if may_kill else [])
        getattr(self, f"_{self.random.choice(kinds)}")()

    def _kill(self) -> None:
        living = [it for it in self.leases() if psutil.pid_exists(it.pid) and it.status not in ("stopped", "finished")]
        lease = self.random.choice(living)
        role = "searcher" if lease.role.startswith("searcher") else lease.role
        with suppress(ProcessLookupError):
            os.kill(lease.pid, signal.SIGKILL)
            self.seen.done[f"kill of the {role}"] += 1
        if role == "supervisor" and self.supervisor:
            self.supervisor.wait(30)
            time.sleep(self.random.uniform(0.0, 20.0))
            self.resume()

    def _scale(self) -> None:
        wanted = str(self.random.randint(1, MOST_SEARCHERS))
        command = self.command("scale", "soak", "--searchers", wanted)
        done = subprocess.run(command, env=self.environment(), capture_output=True, text=True)
        self.seen.done["change of scale" if done.returncode == 0 else "change of scale that was refused"] += 1

    def _faults(self) -> None:
        self.proxy.at_random(self.random.randrange(1 << 30), RATE, FAULTS)
        self.stopping.wait(TROUBLE)
        self.proxy.recover()
        self.seen.done["store that fails"] += 1

    def _absence(self) -> None:
        self.proxy.leave()
        self.stopping.wait(ABSENCE)
        self.proxy.come_back()
        self.seen.done["store that is away"] += 1

    # --- measurements -------------------------------------------------------------------------------------------------

    def watch(self) -> None:
        while not self.stopping.wait(LOOK_EVERY):
            with suppress(TBAError):
                for lease in self.leases():
                    with suppress(psutil.Error):
                        self._look(lease)

    def _look(self, lease: Lease) -> None:
        process = psutil.Process(lease.pid)
        if lease.status in ("stopped", "finished"):
            return
        family = [process] if lease.role == "supervisor" else [process, *process.children(recursive=True)]
        now = time.time()
        self.seen.lives[lease.role, lease.pid].append(
            Measurement(
                at=now,
                age=now - process.create_time(),
                megabytes=sum(it.memory_full_info().uss for it in family) / 1e6,
                files=sum(it.num_fds() for it in family),
                threads=sum(it.num_threads() for it in family),
            )
        )


# --- the report -------------------------------------------------------------------------------------------------------


def grown(lives: Mapping[tuple[str, int], Sequence[Measurement]]) -> dict[str, Any]:
    """Return for the longest life of each role: memory, files and threads after settling and at the end, and the growth
    of memory per hour."""
    found: dict[str, Any] = {}
    for role in sorted({role for role, _ in lives}):
        looks = max((it for (of, _), it in lives.items() if of == role), key=lambda it: it[-1].age)
        settled = [it for it in looks if it.age > SETTLED]
        if len(settled) < 30:
            continue
        tenth = max(1, len(settled) // 10)
        first, last = settled[:tenth], settled[-tenth:]
        hours = (last[-1].at - first[0].at) / 3600
        found[role] = {"minutes": round(hours * 60, 1), "lives": sum(of == role for of, _ in lives)} | {
            name: [statistics.median(getattr(it, name) for it in part) for part in (first, last)]
            for name in ("megabytes", "files", "threads")
        }
        slope = statistics.linear_regression([it.at for it in settled], [it.megabytes for it in settled]).slope
        found[role]["megabytes_an_hour"] = round(3600 * slope, 2)
    return found


def step_times(run: Run) -> dict[str, list[float]]:
    """Return the median duration of a step in each tenth of the run, in milliseconds. `all` is a step without the time
    that it waited for data or for earlier syncs; other load on the CPU changes this duration. The other list has the
    same steps without their forward and backward passes."""
    with storage.connect(run) as con:
        whole, beside = zip(*con.execute(STEPS).fetchall(), strict=True)
    size = max(1, len(whole) // 10)

    def tenths(seconds: Sequence[float]) -> list[float]:
        return [round(1e3 * statistics.median(seconds[n * size : (n + 1) * size]), 2) for n in range(10)]

    return {"all": tenths(whole), "beside forward and backward": tenths(beside)}


def report(soak: Soak, minutes: float, quiet: float, seed: int) -> dict[str, Any]:
    run = soak.run
    problems = check(run).problems
    with storage.connect(run) as con:
        steps, distinct, last, trajectories, doubled, draws, attempts = con.execute(TOTALS).fetchall()[0]
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": hardware(),
        "minutes": minutes,
        "quiet": quiet,
        "seed": seed,
        "done": dict(soak.seen.done),
        "requests": {"all": soak.proxy.met.total(), "failed": soak.proxy.met.total() - soak.proxy.met["pass"]},
        "steps": steps,
        "steps missing or doubled": abs(last - steps) + abs(steps - distinct),
        "trajectories": trajectories,
        "trajectories doubled": doubled,
        "draws": draws,
        "attempts": attempts,
        "problems": [str(problem) for problem in problems],
        "milliseconds of a step, by tenths": step_times(run),
        "longest lives": grown(soak.seen.lives),
    }


def sound(result: Mapping[str, Any]) -> bool:
    """Return whether nothing was lost, doubled or damaged, and every process that was told to stop has stopped."""
    faults = ("problems", "steps missing or doubled", "trajectories doubled")
    return not any(result[name] for name in faults) and "did not stop" not in result["done"]


def disturb(soak: Soak, seconds: float, quiet: float, every: float) -> None:
    began = time.monotonic()
    while (left := began + seconds - time.monotonic()) > 0:
        time.sleep(min(soak.random.expovariate(1 / every), left))
        soak.disturb(may_kill=left > quiet * seconds)


@contextmanager
def watched(soak: Soak) -> Iterator[None]:
    watcher = threading.Thread(target=soak.watch)
    watcher.start()
    try:
        yield
    finally:
        soak.stopping.set()
        watcher.join()


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--quiet", type=float, default=0.5, help="share of the time, at the end, without kills")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between two disturbances, on average")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work, servers.s3(Path(work)) as server, faulty(server) as (proxy, _):
        proxy.operations, proxy.lag = get_args(Operation), 5
        os.environ |= server.environment()
        soak = Soak(f"s3://{servers.BUCKET}/soak", server.environment(), Path(work), proxy, options.seed)
        try:
            soak.start()
            with watched(soak):
                disturb(soak, 60 * options.minutes, options.quiet, options.every)
                soak.end()
        finally:
            soak.abandon()
        result = report(soak, options.minutes, options.quiet, options.seed)
    print(json.dumps(result, indent=1))
    if options.out:
        (options.out / "soak.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0 if sound(result) else 1


if __name__ == "__main__":
    sys.exit(main())
