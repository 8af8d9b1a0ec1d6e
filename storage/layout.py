"""Makes and parses the names of all objects in a run's folder. Each name follows from numbers, from other names or from
the content of the object."""

import re
from typing import NamedTuple

from tba.errors import ConfigError
from tba.types import Version

RUNS = "runs/"
RUN = "run.json"
STATE = "control/state.json"
RENDEZVOUS = "control/rendezvous/"
TRAJECTORIES = "trajectories/"
COMPACTIONS = "compactions/"
SYNCS = "syncs/"
DRAWS = "draws/"
STEPS = "steps/"
LEDGER = "ledger/"
VERSIONS = "versions/"
CHECKPOINTS = "checkpoints/"
ATTEMPTS = "attempts/"
ARITHMETIC = "arithmetic/"
EVALUATIONS = "evaluations/"
EVENTS = "events/"
RETENTION = "retention/"
ROLES = "roles/"
LOGS = "logs/"
PROMPTS = "prompts/"
FORKS = "forks/"
SHARED = (
    PROMPTS, TRAJECTORIES, COMPACTIONS, SYNCS, DRAWS, STEPS, LEDGER, VERSIONS, CHECKPOINTS, ATTEMPTS, ARITHMETIC,
    EVALUATIONS,
)  # fmt: skip
"""Folders in which a fork sees objects of its parent, under the same names as in the parent."""
MANIFEST = "MANIFEST.json"
REPORT = "report.html"

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SEARCHER = re.compile(r"searcher=(\d{3,})")
_SHARD = re.compile(r"trajectories/searcher=(\d{3,})/seq=(\d{8,})\.parquet")
_LARGEST = 2**31 - 1  # largest number of a searcher and of a seq: both are columns of 32 bits
IMPORTS = 1_000_000_000
"""Lowest searcher number of an imported file. Searchers of a run have lower numbers. The number of an imported file
follows from the file's rows (`imported`)."""


def _number(digits: int) -> str:
    """Return a pattern for numbers in names: padded with zeros to `digits` digits, and at most nine digits long, so
    that each number fits a column of 32 bits."""
    return rf"([0-9]{{{digits}}}|[1-9][0-9]{{{digits},8}})"


_PART = r"[A-Za-z0-9_][A-Za-z0-9_.=+@-]*"
_VERSION = f"{_number(6)}-a{_number(4)}"
_PROMPTS = re.compile(rf"prompts/({_PART})\.parquet")
_COMPACTION = re.compile(rf"compactions/{_number(6)}-{_number(6)}-([0-9a-f]{{16}})\.(parquet|json)")
_SYNC = re.compile(rf"syncs/{_number(6)}\.json")
_LEDGER = re.compile(rf"(?:(?:draws|steps)/{_VERSION}\.parquet|ledger/{_VERSION}\.json)")
_FOLDER = re.compile(rf"(?:versions|checkpoints)/{_VERSION}/((?:{_PART}/)*{_PART})")
_ATTEMPT = re.compile(rf"attempts/{_number(4)}\.json")
_ARITHMETIC = re.compile(rf"arithmetic/{_number(4)}\.json")
_RENDEZVOUS = re.compile(rf"control/rendezvous/{_number(4)}\.json")
_EVALUATION = re.compile(rf"evaluations/{_VERSION}\.json")
_LEASE = re.compile(rf"roles/({_PART})/lease\.json")
_EVENT = re.compile(rf"events/({_PART})/{_number(4)}-{_number(6)}\.json")
_LOG = re.compile(rf"logs/({_PART})-{_number(4)}\.log")
_OTHERS = re.compile(
    rf"run\.json|report\.html|prompts/{_PART}\.json|retention/{_number(6)}\.json|forks/{_PART}\.json"
    rf"|events/{_PART}/{_number(4)}-{_number(6)}\.json|control/state\.json|control/probe/{_PART}|roles/{_PART}/lease\.json|logs/.+"
)


def is_run_name(name: object) -> bool:
    """True if this can be the name of a run. Any other name in a record must not become part of a path."""
    return isinstance(name, str) and _RUN_NAME.fullmatch(name) is not None


def run_url(root: str, run: str) -> str:
    if not is_run_name(run):
        raise ConfigError(f"run: a name of letters, digits, '.', '_' and '-' (100 at most), got {run!r}")
    return f"{root.rstrip('/')}/{RUNS}{run}"


def root_of(run_url: str) -> str:
    """Return the root under which a run is stored. If the run was moved to a folder that is not named `runs`, return
    the folder that contains the run."""
    folder = run_url.rpartition("/")[0]
    return folder.removesuffix(f"/{RUNS[:-1]}")


def prompts(split: str) -> str:
    return f"{PROMPTS}{split}.parquet"


def prompts_record(split: str) -> str:
    """Return the name of the record that holds the digest of a split's prompts."""
    return f"{PROMPTS}{split}.json"


def parse_prompts(key: str) -> str | None:
    """Return the split that an object of prompts belongs to. Return None if the key is not the name of such an object;
    the other functions that parse names do the same."""
    match = _PROMPTS.fullmatch(key)
    return match[1] if match else None


def searcher_folder(searcher: int) -> str:
    return f"{TRAJECTORIES}searcher={searcher:03d}/"


def parse_searcher(folder: str) -> int | None:
    """Return the number of the searcher that has this folder under `TRAJECTORIES`; None if it is not the folder of a
    searcher."""
    match = _SEARCHER.fullmatch(folder)
    searcher = int(match[1]) if match else -1
    named = 0 <= searcher <= _LARGEST and searcher_folder(searcher) == f"{TRAJECTORIES}{folder}/"
    return searcher if named else None


def shard(searcher: int, seq: int) -> str:
    if not (0 <= searcher <= _LARGEST and 0 <= seq <= _LARGEST):
        raise ValueError(f"searcher and seq are numbers from 0 to {_LARGEST}, got {searcher} and {seq}")
    return f"{searcher_folder(searcher)}seq={seq:08d}.parquet"


def imported(sha256: str) -> int:
    """Return the searcher number of an imported file. It follows from `sha256`, the digest of the file's rows."""
    return IMPORTS + int(sha256[:16], 16) % 1_000_000_000


def parse_shard(key: str) -> tuple[int, int] | None:
    """Return (searcher, seq) of a shard's name; None if the name is not exactly what `shard` would write."""
    match = _SHARD.fullmatch(key)
    if not match or max(int(match[1]), int(match[2])) > _LARGEST:
        return None
    name = int(match[1]), int(match[2])
    return name if shard(*name) == key else None


class CompactionName(NamedTuple):
    """Name of a compaction's object. Its record has the same name with another suffix."""

    first_sync: int  # the first sync that admitted any of its rows
    last_sync: int  # the last sync that admitted any of its rows
    digest: str  # the start of the object's sha256

    @property
    def object(self) -> str:
        return f"{COMPACTIONS}{self.first_sync:06d}-{self.last_sync:06d}-{self.digest}.parquet"

    @property
    def record(self) -> str:
        return f"{self.object.removesuffix('.parquet')}.json"


def compaction(first_sync: int, last_sync: int, sha256: str) -> CompactionName:
    return CompactionName(first_sync, last_sync, sha256[:16])


def parse_compaction(key: str) -> CompactionName | None:
    """Return the name of a compaction, given the key of its object or of its record."""
    match = _COMPACTION.fullmatch(key)
    return CompactionName(int(match[1]), int(match[2]), match[3]) if match else None


def sync(number: int) -> str:
    return f"{SYNCS}{number:06d}.json"


def parse_sync(key: str) -> int | None:
    match = _SYNC.fullmatch(key)
    return int(match[1]) if match else None


def draws(number: int, attempt: int) -> str:
    return f"{DRAWS}{Version(number, attempt)}.parquet"


def steps(number: int, attempt: int) -> str:
    return f"{STEPS}{Version(number, attempt)}.parquet"


def ledger(number: int, attempt: int) -> str:
    """Return the name of the record that holds the digests of a sync's draws and steps."""
    return f"{LEDGER}{Version(number, attempt)}.json"


def parse_ledger(key: str) -> Version | None:
    """Return the sync and the attempt in the name of a ledger object: the draws, the steps, or the record with the
    digests of both. Return None for any other name."""
    match = _LEDGER.fullmatch(key)
    sync, attempt = (match[1] or match[3], match[2] or match[4]) if match else ("", "")
    return Version(int(sync), int(attempt)) if match else None


def version(version: Version) -> str:
    return f"{VERSIONS}{version}/"


def checkpoint(version: Version) -> str:
    return f"{CHECKPOINTS}{version}/"


def parse_folder(key: str) -> tuple[Version, str] | None:
    """Return the version or checkpoint that an object belongs to, and the object's name inside its folder."""
    match = _FOLDER.fullmatch(key)
    return (Version(int(match[1]), int(match[2])), match[3]) if match else None


def attempt(number: int) -> str:
    return f"{ATTEMPTS}{number:04d}.json"


def parse_attempt(key: str) -> int | None:
    match = _ATTEMPT.fullmatch(key)
    return int(match[1]) if match else None


def arithmetic(attempt: int) -> str:
    """Return the name of the record that says how an attempt computed."""
    return f"{ARITHMETIC}{attempt:04d}.json"


def parse_arithmetic(key: str) -> int | None:
    match = _ARITHMETIC.fullmatch(key)
    return int(match[1]) if match else None


def rendezvous(attempt: int) -> str:
    """Return the name of the record that says where the ranks of an attempt meet."""
    return f"{RENDEZVOUS}{attempt:04d}.json"


def parse_rendezvous(key: str) -> int | None:
    match = _RENDEZVOUS.fullmatch(key)
    return int(match[1]) if match else None


def evaluation(version: Version) -> str:
    return f"{EVALUATIONS}{version}.json"


def parse_evaluation(key: str) -> Version | None:
    match = _EVALUATION.fullmatch(key)
    return Version(int(match[1]), int(match[2])) if match else None


def event(role: str, life: int, seq: int) -> str:
    return f"{EVENTS}{role}/{life:04d}-{seq:06d}.json"


def retention(number: int) -> str:
    return f"{RETENTION}{number:06d}.json"


def fork(run: str) -> str:
    """Return the name of the record by which a run registers a fork of itself."""
    return f"{FORKS}{run}.json"


def lease(role: str) -> str:
    return f"{ROLES}{role}/lease.json"


def parse_lease(key: str) -> str | None:
    """Return the role whose lease has this name; None if this is not the name of a lease."""
    match = _LEASE.fullmatch(key)
    return match[1] if match else None


def log(role: str, life: int) -> str:
    return f"{LOGS}{role}-{life:04d}.log"


def parse_life(key: str) -> tuple[str, int] | None:
    """Return the role and the life that wrote an event or a log; None if this is not the name of an event or a log."""
    match = _EVENT.fullmatch(key) or _LOG.fullmatch(key)
    return (match[1], int(match[2])) if match else None


def role_name(role: str, index: int = 0) -> str:
    return f"{role}-{index:03d}" if role in ("searcher", "trainer-node") else role


def is_part(key: str) -> bool:
    """True if an object of a run can have this name. A run never reads other objects in its folder, and leaves them
    alone."""
    parsers = (
        parse_shard, parse_compaction, parse_prompts, parse_sync, parse_ledger, parse_folder, parse_attempt,
        parse_arithmetic, parse_rendezvous, parse_evaluation,
    )  # fmt: skip
    return bool(_OTHERS.fullmatch(key)) or any(parse(key) is not None for parse in parsers)
