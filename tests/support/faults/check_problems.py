"""The problems that a check of a run reports."""

from storage.maintenance.check import Findings


def reports(findings: Findings, key: str, problem: str = "") -> bool:
    """Return True if the check reports a problem that contains these words, of an object whose key contains these."""
    return any(key in it.key and problem in it.problem for it in findings.problems)
