"""The interfaces (protocols) that the roles need: tasks, generators and storage. Classes in `tba`, `storage` and
`flows` satisfy them by their methods, without inheriting."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from tba.types import (
    Asked,
    Base,
    Draw,
    Example,
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
    from tba.fetched import Fetched  # imports NumPy, which the other interfaces do not need


class Task(Protocol):
    """The prompts of a run, and the reward of each response. The built-in tasks are in `tba.tasks`, one file each."""

    name: str

    def source(self, split: str) -> str:
        """Return where the rows of a split (`train` or `test`) come from if the config names no source. Return an empty
        string if the task makes these rows itself."""
        ...

    def prompts(
        self, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, *, max_tokens: int
    ) -> list[Prompt]:
        """Make prompts of the rows, and leave out prompts of more than `max_tokens` tokens. Raise DataError, which
        names the row and the field, if a row is malformed."""
        ...

    def reward(self, prompt: Prompt, response: Response) -> Reward: ...


@runtime_checkable
class ReadsFields(Protocol):
    """A task that reads only some fields of its data, for example the texts and not the tokens."""

    fields: Collection[str]
    """The names of the fields that the task reads. Rows contain only these fields; other fields are not even
    decoded."""


@runtime_checkable
class TakesOptions(Protocol):
    """A task with options of its own. For any other task, a config that sets `task.options` is refused."""

    options: Any
    """The options as the task has parsed them with `tba.config.parse_options`."""


@runtime_checkable
class ScoresTogether(Protocol):
    """A task that computes the rewards of many responses in one call, for example with a reward model."""

    def rewards(self, asked: Sequence[tuple[Prompt, Response]]) -> Sequence[Reward]:
        """Return one reward for each response, in order. One call gets many responses, for example those of a shard or
        of a part of an evaluation."""
        ...


@runtime_checkable
class UsesModels(Protocol):
    """A task that scores with models of its own."""

    def load(self, locate: "Locate") -> None:
        """Load the models. Searchers and evaluators call this once, before they score anything."""
        ...


class UsedModel(NamedTuple):
    """A model that a task scores with, as a plan of memory needs it."""

    place: str
    dtype: str
    device: str  # as in `model.device`
    searches: bool = True  # False if only evaluations use it


@runtime_checkable
class NamesModels(Protocol):
    """A task that says which models it will load, so that their memory can be planned."""

    def scoring_models(self) -> Sequence[UsedModel]: ...


class Locate(Protocol):
    def __call__(self, setting: str, place: str) -> str | Path:
        """Return where a model can be loaded from. For a URL this is a local folder into which the model was
        downloaded, for a GGUF file the folder to which it was converted, and for `package:NAME/FOLDER` the folder
        inside the installed package. A folder or a name on the Hugging Face hub is returned unchanged. `setting` is the
        setting that contains `place`; error messages name this setting."""
        ...


@runtime_checkable
class Measures(Protocol):
    """A task whose evaluations have measures of their own, in addition to the mean reward."""

    needs_reference: bool
    """True if the measures also need log-probabilities under the reference."""

    def measures(
        self,
        asked: Sequence[tuple[Prompt, Response]],
        rewards: Sequence[Reward],
        ref_logps: Sequence[Sequence[float]] | None,
    ) -> Mapping[str, float]:
        """Return the measures over all responses of an evaluation, by name. A measure `kl` is stored as `greedy_kl` or
        `sampled_kl`. `ref_logps` is None unless `needs_reference` is true. It has one log-probability for each token of
        each response, at the temperature of the response's `logps`. As in `logps`, tokens that the policy did not write
        have 0."""
        ...


@runtime_checkable
class PolicyMaker(Protocol):
    """A task that makes its own small policy to start from."""

    def recipe(self) -> str:
        """Return a text that changes whenever the resulting policy would change. The policy is cached under the digest
        of this text."""
        ...

    def base_policy(self, folder: Path, *, seed: int, report: Callable[[str, float], None]) -> None:
        """Write the policy as a Hugging Face folder. Call `report` with a description of the current work and the share
        that is done."""
        ...


@runtime_checkable
class TakesTurns(Protocol):
    """A task whose environment answers the policy. A response then alternates between turns of the policy and turns of
    the environment, and `reward` finds their texts in `response.turns`."""

    def reply(self, prompt: Prompt, turns: Sequence[str], tokenizer: Any) -> Sequence[int] | None:
        """Return the tokens of the environment's next turn, or None to end the response. Nothing is added before or
        after these tokens: if the policy's chat template needs tokens between two turns, the task must return them too.
        `turns` has the texts of all turns so far: first the policy's, then alternately the environment's and the
        policy's. The result must depend on the prompt and the turns alone."""
        ...


@runtime_checkable
class SplitsIntoSteps(Protocol):
    """A task that divides a response into reasoning steps, and says where each step ends. For other tasks, each line is
    a step."""

    def step_ends(self, text: str) -> Sequence[int]:
        """Return the positions in the text at which reasoning steps end, each as the number of characters before it.
        The start and the end of the text need not be included. A step consists of whole tokens: it ends with the first
        token that reaches the position."""
        ...


class InFlight(Protocol):
    """Accepts requests at any time, and returns each response when it is finished."""

    max_response_tokens: int
    """Maximum number of tokens of any response, even if the request for the response allows more."""

    def submit(self, requests: Sequence[Request]) -> None: ...

    def step(self) -> Collection[tuple[Request, Response]]:
        """Generate for a moment, for example one token of each response. Return the responses that finished in this
        call, each with its request. Return nothing, without delay, if no request is in flight."""
        ...


class Generator(InFlight, Protocol):
    """Samples responses, and owns the weights that it samples with. Apart from rounding, a response does not depend on
    the other requests in the batch."""

    @property
    def tokenizer(self) -> Any:
        """The policy's tokenizer, available once a version has been adopted."""
        ...

    def adopt(self, folder: Path, version: Version) -> None:
        """Load the weights of a version from a Hugging Face folder. Requests in flight continue with the new weights.
        An engine that holds several adapters is an exception: each request in flight keeps its adapter. Raise Busy if
        the requests in flight prevent the change; the version can then be adopted once they have finished."""
        ...

    def close(self) -> None:
        """Release resources outside this process. The generator may adopt a version again afterwards."""
        ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A generator that adopts a version faster if it is told of the version beforehand."""

    def read_ahead(self, folder: Path) -> None:
        """Read the files of a version that may be adopted next. This may be called in any thread, whatever the
        generator is doing. Reading may continue while the files are removed. An unreadable folder raises no error here,
        but when it is adopted."""
        ...


class ReferenceScorer(Protocol):
    """Computes log-probabilities of responses under the reference policy."""

    version: Version

    def token_logps(
        self, prompts: Sequence[Prompt], responses: Sequence[Sequence[Response]], *, temperature: float
    ) -> list[list[tuple[float, ...]]]:
        """Return, for each prompt and each of its responses, one log-probability per token of the response."""
        ...


class TrajectoryLog(Protocol):
    """The part of the replay log that a searcher uses."""

    def next_seq(self, searcher: int) -> int:
        """Return the sequence number of this searcher's next shard: the lowest number above those that sync records
        name, under which no shard is stored."""
        ...

    def asked(self, searcher: int, seqs: Iterable[int]) -> Sequence[Asked]:
        """Return the requests of this searcher whose responses are stored in these shards. Shards that are missing or
        damaged are skipped."""
        ...

    def append(self, searcher: int, seq: int, trajectories: Sequence[Trajectory]) -> str:
        """Store one shard under the name derived from `searcher` and `seq`, and return the name. If a shard with the
        same content is stored under this name already, do nothing more. Raise Superseded if a shard with other content
        has this name: another incarnation of the searcher has stored it."""
        ...


class ReplayBuffer(Protocol):
    """The part of the replay log that the trainer uses. Draws are deterministic: they follow from the seed, the sampler
    and the sync records."""

    def sync(self, sync: int, *, step: int) -> int:
        """Apply sync record `sync`, so that the trajectories that it admits can be drawn. Return the number of these
        trajectories. If the record is not stored yet, write it first. A new record admits all trajectories that have
        arrived. With `sync.lag`, it admits only those up to round `sync` of each searcher. In a replay, it admits those
        that the parent had admitted by `step`."""
        ...

    def replay(self, sync: int) -> None:
        """Apply the stored sync records up to and including `sync`. Raise Missing if one of them is not stored."""
        ...

    def recorded(self, sync: int) -> bool:
        """True if sync record `sync` is stored."""
        ...

    def ready(self, sync: int, *, step: int, until: int) -> bool:
        """True if the trainer need not wait before sync record `sync`. With `sync.lag`, every searcher must have stored
        round `sync`. Otherwise, with `sampling.max_age`, at least a batch of the trajectories that have arrived or were
        admitted must still be young enough at step `until`, the step of the next sync. Always True without both
        settings, in a replay, and once the record is stored."""
        ...

    def waiting(self) -> int:
        """Return the number of trajectories that have arrived but that no sync record has admitted yet."""
        ...

    def queues(self) -> dict[str, Any]:
        """Return the state of the prompt queues as JSON values: which prompts each queue has given out since it was
        last refilled. The state is that after the newest applied sync record, before any draw that follows this
        record."""
        ...

    def restore(self, queues: Mapping[str, Any]) -> None:
        """Continue with the prompt queues that a checkpoint kept."""
        ...

    def draw(self, step: int) -> list[Draw]: ...

    def fetch(self, draws: Sequence[Draw]) -> "Fetched":
        """Return the drawn trajectories, in the order of `draws`."""
        ...


class Ledger(Protocol):
    """The record of what each gradient step drew and measured, written once per sync."""

    def write(self, sync: int, steps: Sequence[StepRecord], *, weights_sha256: str) -> None:
        """Store the records of the steps that sync `sync` closes, under the name of this attempt. `weights_sha256` is
        the digest of the weights after the last of these steps."""
        ...


class CheckpointStore(Protocol):
    """Checkpoints: folders with everything that a trainer needs to continue. A checkpoint is saved only at a sync whose
    ledger is stored."""

    def save(
        self, sync: int, attempt: int, *, step: int, folder: Path,
        sha256s: Mapping[str, str] | None = None, stored: Sequence[Mapping[str, Any]] = (),
    ) -> None:  # fmt: skip
        """Store the files of a folder as a checkpoint. No file of the folder may change afterwards. `sha256s` has the
        digests of files that were hashed while they were written, by name. `stored` has the name, size and sha256 of
        each file of the checkpoint that other ranks have stored already."""
        ...

    def prune(self, keep: int) -> object:
        """Remove all checkpoints except the newest `keep`."""
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
        sha256s: Mapping[str, str] | None = None,
    ) -> bool:
        """Store a Hugging Face folder as this version. No file of the folder may change afterwards. Do nothing if the
        version is stored already. `sha256s` has the digests of files that were hashed while they were written, by name.

        `weights_sha256` is the digest of the weights in full precision, as in the ledger. `changed_share` is the share
        of the weights in the folder that differ from the previous version of this attempt. If a base is passed and the
        difference from the base takes less than half the space, only the difference is stored. Return True if the
        version is stored whole.
        """
        ...

    def complete(self) -> Sequence[Version]:
        """Return the complete versions, oldest first."""
        ...

    def newest(self) -> Version | None:
        """Return the version with the highest number of the highest attempt, or None if none is complete."""
        ...

    def reference(self) -> Version | None:
        """Return version 0 of the earliest attempt that has one, which is the policy before training, or None if there
        is none."""
        ...

    def step(self, version: Version) -> int:
        """Return the gradient step after which this version was published."""
        ...

    def load(self, version: Version) -> Path:
        """Return a local folder with the verified files of a version."""
        ...

    def is_stored(self, version: Version) -> bool:
        """Return whether the store has a version that was loaded. Raise RunFailed if it never will."""
        ...

    def prune(self, *, keep: int, every: int) -> object:
        """Remove versions that nothing needs. The newest `keep` versions and every `every`-th version stay."""
        ...


class Lease(Protocol):
    """The lease of a role. Through the lease the role reports that it is alive, and learns whether it has to stop. The
    lease is renewed in the background."""

    def tell(self, status: str, **progress: float) -> None: ...

    def check(self) -> None:
        """Raise Stopped if the run is to stop, or Superseded if another incarnation has taken over."""
        ...


class EventLog(Protocol):
    def write(self, kind: str, message: str, *, severity: str = "info", **data: Any) -> None: ...


class EvaluationLog(Protocol):
    def write(self, scores: Sequence[Score], examples: Sequence[Example]) -> None: ...

    def done(self) -> set[Version]: ...


class MetricLog(Protocol):
    """A destination for metrics in addition to the ledger. Its methods never raise."""

    def write(self, metrics: Metrics, *, step: int) -> None: ...

    def close(self) -> None: ...
