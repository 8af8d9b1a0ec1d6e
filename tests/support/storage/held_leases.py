"""Wait until a held lease reports an error, and read how often a lease was renewed."""

from storage.runs.held_lease import HeldLease
from storage.runs.leases import read_lease
from storage.runs.run import Run
from tests.support.waiting import until

EVERY = 0.05  # seconds between two renewals of a lease


def check_until(lease: HeldLease, error: type[Exception], match: str) -> None:
    """Check until the lease raises this error."""

    def raised() -> bool:
        try:
            lease.check()
        except error as raised:
            assert match in str(raised)
            return True
        return False

    until(raised)


def counter(run: Run, role: str) -> int:
    lease = read_lease(run, role)
    return lease.counter if lease else -1
