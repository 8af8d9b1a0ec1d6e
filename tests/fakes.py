"""Stand-ins for the far side of a role, each a few lines that record what was asked of them.

Whole roles on real storage are tested in tests/flows; these make the order of events visible in milliseconds.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tba.errors import Stopped
from tba.types import Prompt, Response, Reward, Trajectory, Version


def make_prompts(n: int) -> list[Prompt]:
    return [Prompt(prompt_id=f"p{i}", text=f"{i}?", tokens=(2, 3 + i), answer=str(i)) for i in range(n)]


class Lease:
    """Asks to stop at the given check."""

    def __init__(self, stop_at: int = 10**9):
        self.checks, self.stop_at, self.told = 0, stop_at, []

    def tell(self, status: str, **progress: float) -> None:
        self.told.append(status)

    def check(self) -> None:
        self.checks += 1
        if self.checks >= self.stop_at:
            raise Stopped("enough")


class Events:
    def __init__(self) -> None:
        self.kinds: list[str] = []

    def write(self, kind: str, message: str, *, severity: str = "info", **data: Any) -> None:
        self.kinds.append(kind)


class Versions:
    """Newest versions one after the other; `broken` ones raise when they are loaded."""

    def __init__(self, *newest: Version, broken: dict[Version, Exception] | None = None):
        self.queue, self.broken = list(newest), broken or {}

    def newest(self) -> Version:
        return self.queue.pop(0) if len(self.queue) > 1 else self.queue[0]

    def load(self, version: Version) -> Path:
        if version in self.broken:
            raise self.broken[version]
        return Path(str(version))

    def reference(self) -> Version | None:
        return Version(0, 1)

    def step(self, version: Version) -> int:
        return version.number


class Generator:
    def __init__(self) -> None:
        self.version = Version(-1, -1)
        self.adopted: list[Version] = []
        self.asked: list[list[int]] = []

    def adopt(self, folder: Path, version: Version) -> None:
        self.version = version
        self.adopted.append(version)

    def generate(
        self, prompts: Sequence[Prompt], seeds: Sequence[Sequence[int]], *, temperature: float, top_p: float = 1.0
    ) -> list[list[Response]]:
        self.asked += [list(row) for row in seeds]
        return [[self._response(p, seed, temperature) for seed in row] for p, row in zip(prompts, seeds, strict=True)]

    def _response(self, prompt: Prompt, seed: int, temperature: float) -> Response:
        return Response(
            tokens=(5, 1), logps=(-0.5, -0.1), text=prompt.answer if seed % 2 else "wrong", finished=True,
            temperature=temperature, top_p=1.0, seed=seed, version_start=self.version, version_end=self.version,
            generate_seconds=0.0,
        )  # fmt: skip


class Scorer:
    version = Version(0, 1)

    def token_logps(
        self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Response]], *, temperature: float
    ) -> list[list[tuple[float, ...]]]:
        return [[(-1.0, -1.0) for _ in row] for row in responses]


class Task:
    name = "fake"

    def reward(self, prompt: Prompt, response: Response) -> Reward:
        return Reward(value=float(response.text == prompt.answer))


class Log:
    """The trajectories of each round; `stored` rounds exist already."""

    def __init__(self, stored: int = 0):
        self.stored = stored
        self.rounds: dict[int, list[Trajectory]] = {}

    def next_round(self, searcher: int) -> int:
        return self.stored

    def append(self, searcher: int, seq: int, trajectories: Sequence[Trajectory]) -> str:
        self.rounds[seq] = list(trajectories)
        return str(seq)
