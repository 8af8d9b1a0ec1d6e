"""Starts the roles of a run, kills them as planned, and checks what they have stored."""

import logging
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from hashlib import sha256
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import storage
from benchmarks.crash.kills import RANDOM, ROLES, Kill, shares
from benchmarks.crash.results import Chain, Findings
from benchmarks.crash.victims import COMMAND, preload, signal_of, start
from benchmarks.harness.step_queries import DRAWS, LEDGER
from flows.commands import fork
from flows.planning import create, resolve
from flows.supervision.processes import FAILED
from storage import layout
from storage.log.compactions import Compactions
from storage.maintenance.check import check
from storage.runs.attempts import chain, newest_attempt
from storage.runs.control import change_state
from storage.runs.retention import given_up
from storage.runs.run import Run
from tba.config import parse

SETTINGS = {
    "training.steps": 180,
    "training.prompts_per_step": 4,
    "training.groups_per_micro_batch": 4,
    "search.prompts_per_round": 8,
    "search.initial_fill": 64,
    "sync.every": 2,
    "sync.checkpoint_every": 2,
    "sync.keep_checkpoints": 2,
    "sync.keep_versions": 2,
    "evaluation.every": 10,
    "evaluation.prompts": 4,
    "limits.lease_every": 2.0,
    "limits.silent_after": 20,
    "limits.store_deadline": 20,
}
PASSING = ("control/", "compactions/")
"""Folders whose objects may be replaced: states, and compactions, which larger ones replace. `tba check` compares the
rows of compactions with the records."""
SCORES = """
select version, max(times)
from (select version, metric, count(*) as times from evaluations where not abandoned group by all)
group by 1
"""
STEPS_OF_ATTEMPTS = "select attempt, count(*) from steps group by attempt order by attempt"
TOTALS = "select (select count(*) from steps), (select count(*) from trajectories)"
KILLS_PER_RUN = 14  # maximum: the check after each kill reads everything that the run has stored
LONGEST_LIFE = 120.0  # seconds


class Processes:
    """The processes of a run, at most one of each role."""

    def __init__(self, run: Run, notes: Path, chance: random.Random, roles: Sequence[str]):
        self.run, self.notes, self.chance = run, notes, chance
        self.by_role = {name: self._start(name, None) for name in roles}

    def __getitem__(self, role: str) -> ForkServerProcess:
        return self.by_role[role]

    @property
    def finished(self) -> bool:
        return self["trainer"].exitcode == 0

    def _start(self, role: str, kill: Kill | None) -> ForkServerProcess:
        return start(role, self.run, kill, self.notes, self.chance.getrandbits(32))

    def begin(self, kill: Kill) -> None:
        """Restart the victim with its kill, and every other process that has died."""
        signal_of(self.notes).unlink(missing_ok=True)
        end(self[kill.process])
        self.by_role[kill.process] = self._start(kill.process, kill)
        self.revive()

    def revive(self) -> None:
        for name, process in self.by_role.items():
            if process.exitcode not in (None, 0):
                self.by_role[name] = self._start(name, None)

    def dies_as_planned(self, kill: Kill) -> bool:
        """Wait for the death of the victim. Return False if it survives or the run finishes first."""
        victim = self[kill.process]
        if kill.checkpoints and not self._trains(victim):
            end(victim)
            return False
        if kill.point == RANDOM:
            victim.join(kill.seconds)
            if kill.role == "reader":
                return fails_without_buffer(victim)
            alive = victim.is_alive()
            end(victim)
            return alive
        deadline = time.monotonic() + LONGEST_LIFE
        while victim.is_alive() and time.monotonic() < deadline:
            victim.join(0.05)
            if self.finished:  # a searcher would wait forever
                end(victim)
        return victim.exitcode == -signal.SIGKILL and not self.finished

    def _trains(self, trainer: ForkServerProcess) -> bool:
        """Wait until the attempt has stored the checkpoints that the kill requires. Return False if it does not."""
        deadline = time.monotonic() + LONGEST_LIFE
        while not (stored := signal_of(self.notes).exists()) and trainer.is_alive() and time.monotonic() < deadline:
            trainer.join(0.02)
        return stored

    def finish(self) -> list[str]:
        """Let the run finish, and return what went wrong. Trainer and evaluator end by themselves."""
        self.revive()
        for name in ROLES:
            if name not in self.by_role:
                self.by_role[name] = self._start(name, None)
        for name in ("trainer", "evaluator"):
            self[name].join(5 * LONGEST_LIFE)
        return [
            f"{self.run.name}: the {name} ended with exit code {self[name].exitcode}"
            for name in ("trainer", "evaluator")
            if self[name].exitcode != 0
        ]

    def end(self) -> None:
        for process in self.by_role.values():
            end(process)


def end(process: ForkServerProcess) -> None:
    process.kill()
    process.join()


def fails_without_buffer(trainer: ForkServerProcess) -> bool:
    """Kill the buffer process of a trainer. Return True if the trainer then fails by itself, and False if the trainer
    ends before it has one or does not fail in time."""
    pids = list[int]()
    while trainer.is_alive() and not (pids := buffer_processes_of(trainer)):
        trainer.join(0.02)
    if not trainer.is_alive():
        return False
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    trainer.join(LONGEST_LIFE)
    return trainer.exitcode == FAILED


def buffer_processes_of(trainer: ForkServerProcess) -> list[int]:
    try:
        children = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
        module = COMMAND[-1].encode()
        return [int(pid) for pid in children if module in Path(f"/proc/{pid}/cmdline").read_bytes()]
    except OSError:  # a process has ended meanwhile
        return []


def kill_roles(run: Run, kills: list[Kill], notes: Path, findings: Findings, chance: random.Random) -> list[int]:
    """Carry out kills until none is left or the run has finished, then let the run finish. Return the attempts that
    were killed in training. Kills that came too late are left in `kills`."""
    killed_in_training, too_late = list[int](), list[Kill]()
    in_training = all(kill.checkpoints for kill in kills)
    roles = [name for name in ROLES if not (in_training and name == "evaluator")]  # an evaluator would only take time
    processes = Processes(run, notes, chance, roles)
    try:
        while kills and not processes.finished:
            kill, began = kills.pop(), time.monotonic()
            processes.begin(kill)
            if processes.dies_as_planned(kill):
                findings.kills[kill.name] += 1
                if kill.checkpoints:
                    killed_in_training.append(newest_attempt(run))
                look(run, findings, f"after a kill {kill.name}")
                findings.spend(kill.phase, time.monotonic() - began)
            elif processes.finished:
                kills.append(kill)
            elif processes[kill.process].exitcode == 0:
                too_late.append(kill)  # an evaluator that has scored all versions
            else:
                code = processes[kill.process].exitcode
                findings.wrong.append(f"{run.name}: {kill.process} ended with exit code {code}: {kill.name}")
        findings.wrong += processes.finish()
    finally:
        processes.end()
    kills += too_late
    return killed_in_training


def look(run: Run, findings: Findings, when: str) -> None:
    findings.wrong += [f"{run.name} {when}: {wrong.key}: {wrong.problem}" for wrong in check(run).problems]


def judge(run: Run, notes: Path, findings: Findings, killed_in_training: list[int]) -> None:
    """Find out what a finished run has lost, how many attempts its chain crosses, and whether an unbroken run repeats
    it."""
    look(run, findings, "at the end")
    acknowledged = [line.split(" ", 1) for line in notes.read_text().splitlines()]
    findings.acknowledged += len(acknowledged)
    findings.lost += lost_objects(run, acknowledged, findings)
    count(run, findings)
    findings.chains.append(follow_chain(run, findings, killed_in_training))
    replay(run, notes, findings)


def lost_objects(run: Run, acknowledged: list[list[str]], findings: Findings) -> list[str]:
    """Return the objects that are not stored byte for byte although their write was acknowledged. A shard may be in a
    compaction instead, with the same checksum. Objects that a retention record gives up may be gone."""
    removed = given_up(run)
    gone = {
        *(layout.version(version) for version in removed.versions),
        *(layout.checkpoint(checkpoint) for checkpoint in removed.checkpoints),
    }
    compactions = Compactions(run)
    compactions.look()
    compacted = compactions.shards()
    findings.compacted += len(compacted)
    lost: list[str] = []
    for digest, key in acknowledged:
        if key.startswith(PASSING) or any(key.startswith(folder) for folder in gone):
            continue
        whole = run.store.exists(key) and sha256(run.store.read(key)).hexdigest() == digest
        if not whole and not (key in compacted and compacted[key].sha256 == digest):
            lost.append(f"{run.name}: {key}")
    return lost


def count(run: Run, findings: Findings) -> None:
    """Count steps and trajectories. Every step must be there, and the scores of the first and the last version; no
    version may have scores more than once."""
    with storage.connect(run) as con:
        steps, trajectories = con.execute(TOTALS).fetchone() or (0, 0)
        scored = dict(con.execute(SCORES).fetchall())
    if not scored.keys() >= {0, parse(run.config).last_sync} or set(scored.values()) != {1}:
        findings.wrong.append(f"{run.name}: scores by version: {scored}")
    if steps != SETTINGS["training.steps"]:
        findings.lost.append(f"{run.name}: expected {SETTINGS['training.steps']} steps, found {steps}")
    findings.steps += steps
    findings.trajectories += trajectories


def follow_chain(run: Run, findings: Findings, killed_in_training: list[int]) -> Chain:
    """Follow the chain of attempts that covers all steps. An attempt that was killed in training had stored a
    checkpoint, so the chain must cross it. The view `steps` must show the same chain."""
    config = parse(run.config)
    steps: dict[int, int] = {}
    for span in chain(run):
        last = config.last_sync if span.last_sync is None else span.last_sync
        steps[span.attempt] = config.step_of_sync(last) - config.step_of_sync(max(span.first_sync - 1, 0))
    steps = {attempt: number for attempt, number in steps.items() if number}
    with storage.connect(run) as con:
        viewed = dict(con.execute(STEPS_OF_ATTEMPTS).fetchall())
    if viewed != steps:
        findings.wrong.append(f"{run.name}: steps by attempt are {steps} by the chain and {viewed} by the view `steps`")
    if missing := sorted({*killed_in_training} - steps.keys()):
        findings.wrong.append(f"{run.name}: attempts {missing} had stored a checkpoint, and the chain leaves them out")
    return Chain(
        run=run.name,
        attempts=newest_attempt(run),
        killed_in_training=killed_in_training,
        crossed=list(steps),
        steps=list(steps.values()),
    )


def replay(run: Run, notes: Path, findings: Findings) -> None:
    """Replay the records of a run from the start in one go, and compare draws, numbers and weights."""
    unbroken = fork.fork(run, 0, {}, name=f"{run.name}-unbroken", replay=True)
    trainer = start("trainer", unbroken, None, notes.with_suffix(".unbroken"), 0)
    trainer.join(10 * LONGEST_LIFE)
    end(trainer)
    look(unbroken, findings, "unbroken")
    with storage.connect(run) as ours, storage.connect(unbroken) as theirs:
        for what, query in (("steps", LEDGER), ("draws", DRAWS)):
            if ours.execute(query).fetchall() != theirs.execute(query).fetchall():
                findings.differing.append(f"{run.name}: {what}")


def one_run(run: Run, kills: list[Kill], notes: Path, seed: int) -> tuple[Findings, list[Kill]]:
    """Carry out kills on a planned run, and judge the finished run. Also return the kills for which the run finished
    too early."""
    logging.disable(logging.WARNING)
    preload()
    findings = Findings(run.url)
    notes.touch()
    killed_in_training = kill_roles(run, kills, notes, findings, random.Random(seed))
    change_state(run, desired="stop", why="finished")
    judge(run, notes, findings, killed_in_training)
    return findings, kills


def measure(
    findings: Findings,
    root: str,
    policy: Path,
    kills: list[Kill],
    *,
    scratch: Path,
    seed: int,
    at_once: int,
    keep: Callable[[], None],
) -> None:
    """Carry out all kills, in as many runs as necessary, `at_once` of them at the same time."""
    began, before, number = time.monotonic(), findings.seconds, len(findings.chains)
    under_way: set[Future[tuple[Findings, list[Kill]]]] = set()
    waiting, late = shares(kills, KILLS_PER_RUN), list[Kill]()
    with ProcessPoolExecutor(at_once, multiprocessing.get_context("spawn")) as pool:
        while waiting or under_way:
            while waiting and len(under_way) < at_once:
                config = resolve.resolve("quickstart", {**SETTINGS, "model.path": str(policy), "seed": number})
                run = create.start(config, root, f"crash-{number}")
                notes = scratch / f"{findings.store.partition(' ')[0]}-{number}"
                under_way.add(pool.submit(one_run, run, waiting.pop(), notes, 1000 * seed + number))
                number += 1
            done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
            for future in done:
                of_run, left = future.result()
                findings.add(of_run)
                late += left
            if not under_way and not waiting:
                waiting, late = shares(late, KILLS_PER_RUN), []
            findings.seconds = round(before + time.monotonic() - began, 1)
            print(findings, file=sys.stderr)
            keep()
