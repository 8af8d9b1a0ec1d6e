"""What the roles ask of the rest of the system. `storage` and `flows` satisfy these by shape, without inheriting."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tba.types import (
    Asked,
    Base,
    Draw,
    Metrics,
    Prompt,
    Request,
    Response,
    Reward,
    Score,
    StepRecord,
    Trajectory,
    Version,
)

if TYPE_CHECKING:
    from tba.fetched import Fetched  # NumPy, which nobody needs who only asks what roles ask


class Task(Protocol):
    """What is asked, and how an answer is rewarded. Ours are in `tba.tasks`, one file each."""

    name: str

    def source(self, split: str) -> str:
        """Where the rows of `train` or `test` come from when the config does not say; empty if the task makes them."""
        ...

    def prompts(
        self, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int
    ) -> list[Prompt]:
        """The rows as prompts; too long ones are left out. Raises DataError naming the row and field at fault."""
        ...

    def reward(self, prompt: Prompt, response: Response) -> Reward: ...


@runtime_checkable
class ReadsFields(Protocol):
    """A task whose data have more fields than it reads, such as tokens beside texts."""

    fields: Collection[str]
    """Those that its rows come with; others are not even decoded."""


@runtime_checkable
class TakesOptions(Protocol):
    """A task that can be told more than others: `task.options` of another is refused."""

    options: Any
    """What it read of them, with `tba.config.parse_options`."""


@runtime_checkable
class ScoresTogether(Protocol):
    """A task that rewards many responses at once, as a model does."""

    def rewards(self, asked: Sequence[tuple[Prompt, Response]]) -> Sequence[Reward]:
        """One for each, in order; of a round, or of a piece of an evaluation."""
        ...


@runtime_checkable
class UsesModels(Protocol):
    """A task that scores with models of its own."""

    def load(self, locate: "Locate") -> None:
        """Load them; called once, in searchers and evaluators, before anything is scored."""
        ...


class Locate(Protocol):
    def __call__(self, setting: str, place: str) -> str | Path:
        """A folder with the model at a URL, or the folder or name of the hub that `place` is; `setting` is what named
        it, for errors."""
        ...


@runtime_checkable
class Measures(Protocol):
    """A task with measures of its own beside the mean reward."""

    needs_reference: bool
    """Whether they are made from log-probabilities under the reference, too."""

    def measures(
        self,
        asked: Sequence[tuple[Prompt, Response]],
        rewards: Sequence[Reward],
        ref_logps: Sequence[Sequence[float]] | None,
    ) -> Mapping[str, float]:
        """Of all responses of an evaluation, by name: `kl` becomes `greedy_kl` or `sampled_kl`. Log-probabilities are
        of each response's tokens, at the temperature of its own `logps`; 0, as there, of what another wrote."""
        ...


@runtime_checkable
class PolicyMaker(Protocol):
    """A task that makes its own small policy to start from."""

    def recipe(self) -> str:
        """Changes whenever the policy it makes would; the result is cached by its digest."""
        ...

    def base_policy(self, folder: Path, *, seed: int, report: Callable[[str, float], None]) -> None:
        """Write a Hugging Face folder; `report` is told what is being done and the share that is done."""
        ...


@runtime_checkable
class TakesTurns(Protocol):
    """A task whose environment answers: a response is then turns of the policy with the environment's in between, and
    `reward` finds their texts in `response.turns`."""

    def reply(self, prompt: Prompt, turns: Sequence[str], tokenizer: Any) -> Sequence[int] | None:
        """The tokens that the environment says next; None ends the response. They are made as `prompts` makes those
        of a prompt, but nothing is put around them: what the policy's template wants there is the task's to say.
        `turns` are the texts of all that was said so far, the policy's first, then in turn the environment's and the
        policy's. The answer must follow from prompt and turns alone."""
        ...


@runtime_checkable
class SplitsIntoSteps(Protocol):
    """A task that says where the steps of a response end. Of others, lines are steps."""

    def step_ends(self, text: str) -> Sequence[int]:
        """Places in a response's text, each as the number of characters before it; its two ends need not be named.
        A step is whole tokens: it ends with the first token that reaches the place."""
        ...


class InFlight(Protocol):
    """Takes requests at any time and answers each as it ends."""

    max_response_tokens: int
    """Of every response, whatever its request allows."""

    def submit(self, requests: Sequence[Request]) -> None: ...

    def step(self) -> Collection[tuple[Request, Response]]:
        """Go on for a moment, such as a token; what has ended meanwhile. Nothing, at once, if nothing is in flight."""
        ...


class Generator(InFlight, Protocol):
    """Samples responses. Owns the weights it generates with. What a seed yields does not depend on what it is batched
    with."""

    @property
    def tokenizer(self) -> Any:
        """The policy's. Not before a version has been adopted."""
        ...

    def adopt(self, folder: Path, version: Version) -> None:
        """Load the weights of a version from a Hugging Face folder; what is in flight goes on with them. Busy if it
        cannot: the version may be adopted once that has ended."""
        ...

    def close(self) -> None:
        """Let go of what it holds beyond this process. It may adopt a version again."""
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A generator that takes a version sooner when it has been told of it."""

    def read_ahead(self, folder: Path) -> None:
        """Of a version that may be adopted next. In any thread, whatever the generator does meanwhile; it may go on
        with files that are removed. Never raises for a folder that cannot be read: `adopt` says so."""
        ...


class ReferenceScorer(Protocol):
    """Log-probabilities under the reference policy."""

    version: Version

    def token_logps(
        self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Response]], *, temperature: float
    ) -> list[list[tuple[float, ...]]]: ...


class TrajectoryLog(Protocol):
    """A searcher's side of the replay log."""

    def next_seq(self, searcher: int) -> int:
        """The first seq of this searcher under which no shard is stored."""
        ...

    def asked(self, searcher: int, seqs: Iterable[int]) -> Sequence[Asked]:
        """What the trajectories in these shards of this searcher answer, as far as they are stored and can be read."""
        ...

    def append(self, searcher: int, seq: int, trajectories: Sequence[Trajectory]) -> str:
        """Store one shard under its derived name and return the name. The same content again is done already;
        other content under the name means another incarnation owns it: Superseded."""
        ...


class ReplayBuffer(Protocol):
    """The trainer's side of the replay log. Deterministic: draws follow from seed, sampler and records."""

    def sync(self, sync: int, *, step: int) -> int:
        """Apply record `sync`: the stored one where it exists, else a new one of all that has arrived.
        Returns the number of trajectories it admits."""
        ...

    def replay(self, sync: int) -> None:
        """Apply the stored records up to and including `sync`. Missing if one is not there."""
        ...

    def recorded(self, sync: int) -> bool:
        """Whether record `sync` is stored."""
        ...

    def ready(self, sync: int, *, step: int, until: int) -> bool:
        """Whether record `sync` is stored or all that it has to admit has arrived: where searchers and trainer go in
        step, that round of every searcher; otherwise, where ages are bounded, so much that with what was admitted
        before there are the trajectories of a batch that are not too old at any step `until` the next sync."""
        ...

    def waiting(self) -> int:
        """Trajectories that have arrived and that no record admits yet."""
        ...

    def queues(self) -> dict[str, Any]:
        """Which prompts have been drawn since each queue was last refilled, as of the newest applied record,
        before any later draw; JSON-able."""
        ...

    def restore(self, queues: Mapping[str, Any]) -> None:
        """Continue with the queues that a checkpoint kept."""
        ...

    def draw(self, step: int) -> list[Draw]: ...

    def fetch(self, draws: Sequence[Draw]) -> "Fetched":
        """The drawn trajectories, in the order of `draws`."""
        ...


class Ledger(Protocol):
    """What each gradient step used and found, written once per sync."""

    def write(self, sync: int, steps: Sequence[StepRecord], *, weights_sha256: str) -> None:
        """Store the steps that sync `sync` closes under this attempt's name; `weights_sha256` is of the weights
        after the last of them."""
        ...


class CheckpointStore(Protocol):
    """Everything a trainer needs to go on, as folders; only at syncs whose ledger is stored."""

    def save(self, sync: int, attempt: int, *, step: int, folder: Path) -> None: ...

    def prune(self, keep: int) -> object:
        """Give up all but the newest `keep`."""
        ...


class VersionStore(Protocol):
    """Published policies, as Hugging Face folders."""

    def publish(
        self,
        version: Version,
        *,
        step: int,
        folder: Path,
        weights_sha256: str,
        changed_share: float | None = None,
        base: Base | None = None,
    ) -> bool:
        """Store a Hugging Face folder as this version; `weights_sha256` is of the weights in full precision, as in the
        ledger, and `changed_share` of those in the folder that differ from what this attempt published before. Done if
        it is stored already. With a base the difference is stored where that is less than half. Returns whether all is
        stored whole."""
        ...

    def complete(self) -> Sequence[Version]:
        """Those that exist, oldest first."""
        ...

    def newest(self) -> Version | None:
        """Of the highest attempt, the highest number that is complete."""
        ...

    def reference(self) -> Version | None:
        """Version 0 of the earliest attempt that has one: the policy before training."""
        ...

    def step(self, version: Version) -> int: ...

    def load(self, version: Version) -> Path:
        """A local folder with the verified files of a version."""
        ...

    def prune(self, *, keep: int, every: int) -> object:
        """Give up what nothing needs any more: not the newest `keep`, not each `every`-th."""
        ...


class Lease(Protocol):
    """How a role says that it lives and hears what is wanted of it. Renewed in the background."""

    def tell(self, status: str, **progress: float) -> None: ...

    def check(self) -> None:
        """Raises Stopped when the run is to stop, Superseded when another incarnation has taken over."""
        ...


class EventLog(Protocol):
    def write(self, kind: str, message: str, *, severity: str = "info", **data: Any) -> None: ...


class EvaluationLog(Protocol):
    def write(self, scores: Sequence[Score]) -> None: ...

    def done(self) -> set[Version]: ...


class MetricLog(Protocol):
    """Where metrics go besides the ledger. Never raises."""

    def write(self, metrics: Metrics, *, step: int) -> None: ...

    def close(self) -> None: ...
