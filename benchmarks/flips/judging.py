"""Judges damage to a stored run: whether `tba check` names it, and whether an answer of the run changes."""

import shutil
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.flips.damage import Damage
from benchmarks.flips.small_run import answers, put
from storage import layout
from storage.maintenance.check import Problem, check
from storage.objects.open_store import open_store
from storage.runs.run import Run
from tba.errors import TBAError

VERDICTS = ("named", "named by another", "harmless", "changed", "crashed")
FINDINGS = ("changed", "crashed")


@dataclass(frozen=True)
class Judged:
    damage: Damage
    verdict: str
    reasons: list[str]  # problems, answers that changed, or a traceback
    seconds: float = 0.0


class Subject:
    """Copies of runs that are damaged in one place at a time, and their answers while undamaged. `cache` is
    `$TBA_CACHE`. It is emptied before each check, because copies in it would hide damage in the store."""

    def __init__(self, root: str, names: Sequence[str], cache: Path):
        self.urls = {name: layout.run_url(root, name) for name in names}
        self.cache = cache
        self.known = {name: self._problems(name) for name in names}
        self.whole = self._answers()

    def judge(self, damage: Damage) -> Judged:
        began = time.perf_counter()
        store = open_store(self.urls[damage.run])
        data = store.read(damage.key)
        try:
            put(store, damage.key, damage.applied(data))
            verdict, reasons = self._verdict(damage)
        except Exception:
            verdict, reasons = "crashed", [traceback.format_exc()]
        finally:
            put(store, damage.key, data)
        if verdict == "changed" and (unsteady := self._differing()):
            raise RuntimeError(f"answers of an undamaged run are not always the same: {unsteady}")
        return Judged(damage, verdict, reasons, time.perf_counter() - began)

    def _verdict(self, damage: Damage) -> tuple[str, list[str]]:
        for name in sorted(self.urls, key=lambda name: name != damage.run):
            problems = [problem for problem in self._problems(name) if problem not in self.known[name]]
            if problems:
                is_there = name == damage.run or damage.key.startswith(layout.SHARED)
                named = is_there and any(_is_about(problem, damage.key) for problem in problems)
                said = [f"{problem.key}: {problem.problem}" for problem in problems]
                return "named" if named else "named by another", said
        differing = self._differing()
        return "changed" if differing else "harmless", differing

    def _problems(self, name: str) -> list[Problem]:
        """Return the problems that the check finds in a run. An error that ends the check, or that keeps the run from
        being opened, is a problem without a key."""
        shutil.rmtree(self.cache, ignore_errors=True)
        try:
            return check(Run.open(self.urls[name])).problems
        except TBAError as error:
            return [Problem("", str(error))]

    def _answers(self) -> dict[str, str]:
        shutil.rmtree(self.cache, ignore_errors=True)
        of_each = {name: answers(Run.open(url)) for name, url in self.urls.items()}
        return {f"{name}: {about}": it for name, found in of_each.items() for about, it in found.items()}

    def _differing(self) -> list[str]:
        now = self._answers()
        names = [name for name in {**self.whole, **now} if self.whole.get(name) != now.get(name)]
        return [f"{name}: {now.get(name, 'gone') if len(now.get(name, '')) != 64 else 'another'}" for name in names]


def _is_about(problem: Problem, key: str) -> bool:
    """True if a problem names this object, or the version or checkpoint that the object belongs to. A problem without a
    key is about the objects in its text, and always about `run.json`."""
    if not problem.key:
        return key in problem.problem or key == layout.RUN
    return problem.key == key or (problem.key.endswith("/") and key.startswith(problem.key))
