"""Collects the results of the runs on one store."""

import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.crash.kills import AT_ANY_TIME, IN_TRAINING

LONG_CHAIN = 5  # attempts


@dataclass(frozen=True, kw_only=True)
class Chain:
    """The attempts of a finished run, and the chain of attempts whose steps count."""

    run: str
    attempts: int  # number of lives of the trainer that claimed an attempt
    killed_in_training: list[int]  # attempts that were killed after they had stored a checkpoint
    crossed: list[int]  # attempts of the chain that covers all steps, oldest first
    steps: list[int]  # number of steps that count, for each attempt crossed


@dataclass
class Findings:
    store: str
    kills: Counter[str] = field(default_factory=Counter)  # by kind of instant
    kill_seconds: dict[str, float] = field(default_factory=dict)  # by phase, from the start of a life to its check
    chains: list[Chain] = field(default_factory=list)  # one per finished run
    steps: int = 0
    trajectories: int = 0
    compacted: int = 0  # shards in compactions at the end
    acknowledged: int = 0  # objects whose write was acknowledged
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # problems of checks, and other failures
    differing: list[str] = field(default_factory=list)  # what an unbroken run does not repeat bit by bit
    seconds: float = 0.0

    def add(self, other: "Findings") -> None:
        """Add the findings of another run."""
        self.kills.update(other.kills)
        for phase, seconds in other.kill_seconds.items():
            self.spend(phase, seconds)
        for name in ("chains", "steps", "trajectories", "compacted", "acknowledged", "lost", "wrong", "differing"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def spend(self, phase: str, seconds: float) -> None:
        self.kill_seconds[phase] = round(self.kill_seconds.get(phase, 0.0) + seconds, 2)

    @property
    def faults(self) -> list[str]:
        return [*self.lost, *self.wrong, *self.differing]

    @property
    def in_training(self) -> int:
        return sum(number for name, number in self.kills.items() if name.startswith(IN_TRAINING))

    @property
    def seconds_per_kill(self) -> dict[str, float]:
        numbers = {IN_TRAINING: self.in_training, AT_ANY_TIME: self.kills.total() - self.in_training}
        return {phase: round(seconds / numbers[phase], 2) for phase, seconds in self.kill_seconds.items()}

    @property
    def crossed(self) -> dict[str, float]:
        """Numbers of attempts that the chains of runs with kills in training cross."""
        lengths = [len(chain.crossed) for chain in self.chains if chain.killed_in_training]
        if not lengths:
            return {}
        return {
            "chains": len(lengths),
            "min": min(lengths),
            "median": statistics.median(lengths),
            "max": max(lengths),
            f"at_least_{LONG_CHAIN}": sum(length >= LONG_CHAIN for length in lengths),
        }

    def facts(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "kills": dict(sorted(self.kills.items())),
            "seconds_per_kill": self.seconds_per_kill,
            "runs": len(self.chains),
            "kills_in_training": self.in_training,
            "attempts_crossed": self.crossed,
        }

    def __str__(self) -> str:
        text = (
            f"{self.store}: {self.kills.total()} kills ({self.in_training} in training) at {len(self.kills)} kinds of "
            f"instants, {len(self.chains)} runs, {self.steps} steps, {self.trajectories} trajectories, "
            f"{self.compacted} shards compacted, {self.acknowledged} acknowledged objects: {len(self.lost)} lost, "
            f"{len(self.wrong)} problems, {len(self.differing)} differences from an unbroken run"
        )
        if crossed := self.crossed:
            text += (
                f"; the {crossed['chains']} chains of runs killed in training cross {crossed['min']} to "
                f"{crossed['max']} attempts (median {crossed['median']:g}), "
                f"{crossed[f'at_least_{LONG_CHAIN}']} of them at least {LONG_CHAIN}"
            )
        return text
