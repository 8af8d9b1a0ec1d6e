"""Every name inside a run's folder. Names are derived, never random; nothing else in the project builds a path."""

import re

from tba.errors import ConfigError
from tba.types import Version

RUNS = "runs/"
RUN = "run.json"
STATE = "control/state.json"
TRAJECTORIES = "trajectories/"
SYNCS = "syncs/"
DRAWS = "draws/"
STEPS = "steps/"
VERSIONS = "versions/"
CHECKPOINTS = "checkpoints/"
ATTEMPTS = "attempts/"
EVALUATIONS = "evaluations/"
EVENTS = "events/"
RETENTION = "retention/"
ROLES = "roles/"
LOGS = "logs/"
PROMPTS = "prompts/"
MANIFEST = "MANIFEST.json"

_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SHARD = re.compile(r"trajectories/searcher=(\d{3,})/seq=(\d{8,})\.parquet")


def run_url(root: str, run: str) -> str:
    if not _RUN_NAME.fullmatch(run):
        raise ConfigError(f"run: a name of letters, digits, '.', '_' and '-' (100 at most), got {run!r}")
    return f"{root.rstrip('/')}/{RUNS}{run}"


def root_of(run_url: str) -> str:
    """The root of a run that lies where `run_url` puts it; the folder it is in, of one that was moved."""
    folder = run_url.rpartition("/")[0]
    return folder.removesuffix(f"/{RUNS[:-1]}")


def prompts(split: str) -> str:
    return f"{PROMPTS}{split}.parquet"


def searcher_folder(searcher: int) -> str:
    return f"{TRAJECTORIES}searcher={searcher:03d}/"


def shard(searcher: int, seq: int) -> str:
    return f"{searcher_folder(searcher)}seq={seq:08d}.parquet"


def parse_shard(key: str) -> tuple[int, int] | None:
    """(searcher, seq) of a shard's name; None if it is not one."""
    match = _SHARD.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


def sync(number: int) -> str:
    return f"{SYNCS}{number:06d}.json"


def draws(number: int, attempt: int) -> str:
    return f"{DRAWS}{Version(number, attempt)}.parquet"


def steps(number: int, attempt: int) -> str:
    return f"{STEPS}{Version(number, attempt)}.parquet"


def version(version: Version) -> str:
    return f"{VERSIONS}{version}/"


def checkpoint(version: Version) -> str:
    return f"{CHECKPOINTS}{version}/"


def attempt(number: int) -> str:
    return f"{ATTEMPTS}{number:04d}.json"


def evaluation(version: Version) -> str:
    return f"{EVALUATIONS}{version}.json"


def event(role: str, life: int, seq: int) -> str:
    return f"{EVENTS}{role}/{life:04d}-{seq:06d}.json"


def retention(number: int) -> str:
    return f"{RETENTION}{number:06d}.json"


def lease(role: str) -> str:
    return f"{ROLES}{role}/lease.json"


def log(role: str, attempt: int) -> str:
    return f"{LOGS}{role}-{attempt:04d}.log"


def role_name(role: str, index: int = 0) -> str:
    return f"{role}-{index:03d}" if role == "searcher" else role
