"""The arithmetic of an attempt: how the trainer really computed, which `auto` in the settings does not say.

The trainer stores the record once, when it has loaded the policy: only then the size of the model is known. So an
attempt that ended before has no record, and neither has an attempt of an older run.
"""

from dataclasses import asdict, dataclass

from storage import layout
from storage.objects import records
from storage.runs.run import Run
from tba.errors import Damaged, Missing


@dataclass(frozen=True, kw_only=True)
class Arithmetic:
    compute_dtype: str  # the number format in which matrices are multiplied, such as bfloat16
    device: str  # the kind of device, such as cpu
    threads: int  # number of threads with which torch computes on a CPU
    torch: str  # version of torch

    def __str__(self) -> str:
        threads = f" with {self.threads} thread{'s' * (self.threads > 1)}" if self.device == "cpu" else ""
        return f"{self.compute_dtype} on {self.device}{threads}, torch {self.torch}"


def note_arithmetic(run: Run, attempt: int, arithmetic: Arithmetic) -> None:
    """Store the record of an attempt. Raise AlreadyExists if the attempt has one."""
    record = {"attempt": attempt, **asdict(arithmetic), "created_at": records.now()}
    run.store.create(layout.arithmetic(attempt), records.encode(record))


def find_arithmetic(run: Run, attempt: int) -> Arithmetic | None:
    """Return the record of an attempt; None if the attempt has none. Raise Damaged if the record cannot be read."""
    key = layout.arithmetic(attempt)
    try:
        return decode(run.store.read(key), f"{run.url}/{key}", attempt)
    except Missing:
        return None


def decode(data: bytes, name: str, attempt: int) -> Arithmetic:
    """Decode the record of this attempt. Raise Damaged, naming the object, if the bytes are not its record."""
    record = records.decode(data, name, "attempt", "compute_dtype", "device", "threads", "torch")
    with records.reading(name):
        arithmetic = records.known(Arithmetic, record)
    if record["attempt"] != attempt:
        raise Damaged(f"{name} is the record of another attempt, {record['attempt']!r:.20}")
    return arithmetic
