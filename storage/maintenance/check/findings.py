"""The findings of a check: problems, notes, and how many things of each kind were checked."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from storage.objects import records
from storage.queries.mirror import Progress
from tba.errors import Damaged, Missing, TBAError


@dataclass(frozen=True)
class Problem:
    """Something that is wrong with an object of a run."""

    key: str
    problem: str


@dataclass
class Findings:
    """The result of a check."""

    run: str
    checked: dict[str, int] = field(default_factory=dict)  # number of checked things by kind
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # worth knowing, but not wrong

    @property
    def ok(self) -> bool:
        return not self.problems


class FindingsLog:
    """Collects the findings of all checkers of one run, and reports the progress of the check."""

    def __init__(self, run: str, url: str, *, total: int, progress: Progress):
        self.findings = Findings(run)
        self._url, self._progress = url, progress
        self._done, self._total = 0, total  # objects; a version or a checkpoint counts as one

    def report(self, key: str, problem: str) -> None:
        self.findings.problems.append(Problem(key, problem))

    def report_unless_known(self, key: str, problem: str) -> None:
        """Report a problem of an object, unless a problem of this object has been reported already."""
        if all(known.key != key for known in self.findings.problems):
            self.report(key, problem)

    def note(self, note: str) -> None:
        self.findings.notes.append(note)

    def count(self, kind: str, number: int = 1) -> None:
        self.findings.checked[kind] = self.findings.checked.get(kind, 0) + number

    @contextmanager
    def looking_at(self, key: str) -> Iterator[None]:
        """If the block finds the object `key` missing or damaged, report the problem and continue after the block. If
        the store does not answer, this is not a problem of the object: the error is raised and ends the check."""
        try:
            with records.reading(key):
                yield
        except Missing:
            self.report(key, "is missing")
        except Damaged as error:
            reason = str(error).splitlines()[0].removeprefix(f"{self._url}/")
            self.report(key, reason.removeprefix(key).strip(" :"))
        except OSError as error:
            if isinstance(error, TBAError):
                raise
            self.report(key, f"cannot be read: {error.strerror or error}")
        self._done += 1
        self._progress(min(self._done, self._total), self._total)

    def finish(self) -> Findings:
        self._progress(self._total, self._total)
        return self.findings
