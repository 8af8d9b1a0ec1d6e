"""Fakes for everything that a role talks to. Each is a few lines that record the calls.

Tests in tests/flows run whole roles on real storage; fakes show the order of events within milliseconds.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tba.errors import ConfigError, Stopped
from tba.types import Asked, Prompt, Request, Response, Reward, Trajectory, Version


def make_prompts(n: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{i}", text=f"{i}?", tokens=(2, 3 + i), answer=str(i)) for i in range(n)]


class Lease:
    """A lease whose check raises `verdict`, by default Stopped, from check `stop_at` on or once `stop_when` is true."""

    def __init__(
        self,
        stop_at: int = 10**9,
        verdict: Exception | None = None,
        *,
        stop_when: Callable[[], bool] = lambda: False,
    ):
        self.checks, self.stop_at, self.told = 0, stop_at, []
        self.stop_when = stop_when
        self.verdict = verdict or Stopped("enough")

    def tell(self, status: str, **progress: float) -> None:
        self.told.append(status)

    def check(self) -> None:
        self.checks += 1
        if self.checks >= self.stop_at or self.stop_when():
            raise self.verdict


class Events:
    def __init__(self) -> None:
        self.written: list[tuple[str, str]] = []  # kinds and severities

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.written]

    def write(self, kind: str, message: str, *, severity: str = "info", **data: Any) -> None:
        self.written.append((kind, severity))


class AtOnce:
    """A `Background` that runs each job at once: a look for versions ends before anything else happens."""

    def __init__(self, name: str): ...

    def idle(self) -> bool:
        return True

    def check(self) -> None: ...

    def submit(self, job: Callable[[], None]) -> None:
        job()

    def finish(self) -> None: ...

    def close(self) -> None: ...


class Versions:
    """A version store whose newest version changes with each look. Versions in `broken` raise when they are loaded."""

    def __init__(self, *newest: Version, broken: dict[Version, Exception] | None = None):
        self.queue, self.broken = list(newest), broken or {}
        self.seen: list[Version] = []
        self.loaded: list[Version] = []
        self.missing: dict[Version, float] = {}  # how many more looks find that the version is not stored

    def publish(self, version: Version, **_: Any) -> bool:
        self.queue.append(version)
        return True

    def complete(self) -> list[Version]:
        return sorted(set(self.seen), key=lambda version: version.order)

    def newest(self) -> Version:
        self.seen.append(self.queue.pop(0) if len(self.queue) > 1 else self.queue[0])
        return self.seen[-1]

    def load(self, version: Version) -> Path:
        self.loaded.append(version)
        if version in self.broken:
            raise self.broken[version]
        return Path(str(version))

    def is_stored(self, version: Version) -> bool:
        self.missing[version] = self.missing.get(version, 0) - 1
        return self.missing[version] < 0

    def reference(self) -> Version | None:
        return Version(0, 1)

    def step(self, version: Version) -> int:
        return version.number

    def prune(self, *, keep: int, every: int) -> None: ...


class Generator:
    """A generator whose responses are right for odd seeds and wrong for even ones, once it has adopted a version. The
    responses to one call of `submit` come together, from the second call of `step` after it."""

    max_response_tokens = 512

    def __init__(self) -> None:
        self.version: Version | None = None
        self.adopted: list[Version] = []
        self.asked: list[list[int]] = []  # the seeds of each prompt
        self.settings: list[tuple[float, float]] = []  # temperature and top_p of the requests of each call
        self.tokenizer: Any = None
        self.thinking: list[list[Request]] = []

    def adopt(self, folder: Path, version: Version) -> None:
        self.version = version
        self.adopted.append(version)

    def submit(self, requests: Sequence[Request]) -> None:
        rows: dict[int, list[int]] = {}
        for request in requests:
            rows.setdefault(id(request.prompt), []).append(request.seed)
        self.asked += rows.values()
        self.settings += {(request.temperature, request.top_p) for request in requests}
        self.thinking += [[], list(requests)]

    def step(self) -> list[tuple[Request, Response]]:
        requests = self.thinking.pop(0) if self.thinking else []
        return [(it, self.make_response(it.prompt, it.seed, it.temperature)) for it in requests]

    def close(self) -> None: ...

    def make_response(self, prompt: Prompt, seed: int, temperature: float) -> Response:
        if self.version is None:
            raise ConfigError("no version has been adopted yet, so this generator has no weights: call adopt() first")
        return Response(
            tokens=(5, 1), logps=(-0.5, -0.1), text=prompt.answer if seed % 2 else "wrong", finished=True,
            temperature=temperature, top_p=1.0, seed=seed, version_start=self.version, version_end=self.version,
            generate_seconds=0.0,
        )  # fmt: skip


class Scorer:
    def __init__(self) -> None:
        self.version = Version(0, 1)
        self.temperatures: list[float] = []

    def token_logps(
        self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Response]], *, temperature: float
    ) -> list[list[tuple[float, ...]]]:
        self.temperatures.append(temperature)
        return [[(-1.0, -1.0) for _ in row] for row in responses]


class Task:
    name = "fake"

    def source(self, split: str) -> str:
        return ""

    def prompts(
        self, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int
    ) -> list[Prompt]:
        return [replace(prompt, prompt_id=f"{split}-{prompt.prompt_id}") for prompt in make_prompts(3)]

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        return Reward(value=float(response.text == prompt.answer))


class Log:
    """A trajectory log in memory: the trajectories of each shard."""

    def __init__(self, stored: Mapping[int, Sequence[Trajectory]] = MappingProxyType({})):
        self.shards = dict(stored)

    def next_seq(self, searcher: int) -> int:
        return len(self.shards)

    def asked(self, searcher: int, seqs: Iterable[int]) -> list[Asked]:
        return [Asked(it.round, it.slot, it.prompt_id) for seq in seqs for it in self.shards[seq]]

    def append(self, searcher: int, seq: int, trajectories: Sequence[Trajectory]) -> str:
        assert seq == len(self.shards)
        self.shards[seq] = list(trajectories)
        return str(seq)
