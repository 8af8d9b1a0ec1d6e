"""The problems that a check of a run reports."""

from storage.maintenance.check import Findings


def found(findings: Findings, key: str, problem: str = "") -> bool:
    """Return True if the check reports a problem of an object that contains these words."""
    return any(key in it.key and problem in it.problem for it in findings.problems)
