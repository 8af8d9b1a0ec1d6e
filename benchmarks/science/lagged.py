"""Runs with an exact lag, in one process and in memory, with the real searcher, learner, evaluator and sampler.

Sync n comes before step n x `sync.every` + 1 and admits one round. The policy from `sync.lag` syncs before has
generated it, or the base policy if the run is not that old. With `sync.every` = 1, a lag of 0 is on policy. This is the
same as in a run whose searcher and trainer go in step; settings that would make a difference (`HELD`) are refused. If a
step learns from all new trajectories and nothing else, its batch is the newest round as it was generated. Otherwise the
batch is drawn through the index of the replay buffer. Only weights for adoption are written to disk.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import count
from pathlib import Path
from shutil import copytree
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.harness import fakes
from benchmarks.harness.fetched import fetched_of
from flows.roles.model_loading import model_here
from storage.buffer.index import Index
from storage.buffer.sampler import default_sampler
from storage.local_files.shared_cache import cache_folder
from storage.log.schema import to_table
from tba.config import Config
from tba.errors import ConfigError, Missing
from tba.generation.transformers_generator import TransformersGenerator
from tba.interfaces import Task, UsesModels
from tba.models.policy import Policy, PolicyScorer
from tba.search.evaluator import Evaluator
from tba.search.prompt_stream import PromptStream
from tba.search.searcher import Searcher
from tba.tasks.registry import get_task, policy_maker
from tba.train.learner import Learner
from tba.types import Trajectory, Version

START = Version(0, 1)
HELD: Mapping[str, Any] = {
    "model.revision": "main",
    "model.trust_remote_code": False,
    "model.dtype": "float32",
    "model.device": "auto",
    "model.lora_rank": 0,
    "sampling.sql": "",
    "search.prompts_where": "",
    "search.searchers": 1,
}
"""Settings with a single possible value here. Other values would silently have no effect."""


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Scores of the policy after a step."""

    step: int
    measures: Mapping[str, float]  # what the examination returned
    reward: float  # mean of the trajectories learned from since the last score, like `age`
    age: float
    generated: Sequence[Trajectory]  # since the last score


Examine = Callable[[Path], Mapping[str, float]]
"""A function that examines the policy in a folder."""


def lagged_run(config: Config, *, scored_after: Collection[int], examine: Examine) -> Iterator[Scored]:
    """Examine the policy after these steps. Raise ConfigError for settings that are not possible here."""
    lag, every = checked_lag(config), config.sync.every
    task = _task_of(config)
    with TemporaryDirectory(prefix="tba-") as scratch:
        start = start_of(config)
        policy = Policy.load(start)
        learner = Learner(config, policy)
        weights = Weights(start, Path(scratch) / "adopted", kept=lag + 1, dtype=config.model.publish_dtype)
        searcher = _searcher(config, task, policy, start, weights)
        buffer = Buffer(config)
        learned: list[tuple[float, int]] = []
        generated: list[Trajectory] = []
        for step in range(1, config.training.steps + 1):
            sync, within = divmod(step - 1, every)
            if within == 0:
                searcher.adoption.adopt(Version(max(0, step - 1 - lag * every), 1))
                new = _round(config, searcher, sync)
                generated += new
                buffer.admit(step - 1, new)
            drawn = buffer.draw(step)
            learner.learn(step, learner.collate(fetched_of(drawn)))
            learned += [(it.reward, step - 1 - it.version_start.number) for it in drawn]
            if step % every == 0:
                weights.add(step, policy.model)
            if step in scored_after:
                measures = examine(weights.write(weights.published(policy.model)))
                reward, age = map(mean, zip(*learned, strict=True))
                yield Scored(step=step, measures=measures, reward=reward, age=age, generated=generated)
                learned, generated = [], []


class Weights:
    """The newest versions, in memory, with the number format of `model.publish_dtype`. Version n has the weights after
    step n. The folder has one of them at a time."""

    def __init__(self, start: Path, folder: Path, *, kept: int, dtype: str):
        self.folder, self.dtype = copytree(start, folder), getattr(torch, dtype)
        self.versions = deque[tuple[int, dict[str, Tensor]]](maxlen=kept)
        self.add(0, Policy.load(start).model)

    def add(self, number: int, model: nn.Module) -> None:
        self.versions.append((number, self.published(model)))

    def load(self, version: Version) -> Path:
        for number, tensors in self.versions:
            if number == version.number:
                return self.write(tensors)
        raise Missing(f"version {version} is not kept any more")

    def complete(self) -> list[Version]:
        """Return no version, so that none is fetched ahead of its round into the only folder."""
        return []

    def write(self, tensors: dict[str, Tensor]) -> Path:
        """Replace the weights in the folder, and return it."""
        save_file(tensors, self.folder / "model.safetensors", metadata={"format": "pt"})
        return self.folder

    def published(self, model: nn.Module) -> dict[str, Tensor]:
        """Return copies of a model's tensors: the model goes on learning, and safetensors refuses shared memory."""
        return {
            name: it.detach().to(self.dtype if it.is_floating_point() else it.dtype, copy=True)
            for name, it in model.state_dict().items()
        }


class Buffer:
    """The data to learn from: the newest round as it was generated, or what the sampler draws from all rounds."""

    def __init__(self, config: Config):
        search, training, sampling = config.search, config.training, config.sampling
        self.index: Index | None = None
        self.newest: Sequence[Trajectory] = ()
        self.rows: dict[str, Trajectory] = {}
        shape = (search.prompts_per_round, search.responses_per_prompt)
        fits = shape == (training.prompts_per_step, training.responses_per_prompt)
        plain = sampling.recent_share == 1 and sampling.copies == "all" and sampling.mean_reward_between is None
        if not (fits and plain and config.sync.every == 1):
            self.index = Index(
                default_sampler(),
                seed=config.seed,
                sampling=sampling,
                training=training,
                step_of_version=lambda version: version.number,
            )

    def admit(self, step: int, trajectories: Sequence[Trajectory]) -> None:
        """Admit the round of the sync that follows this step."""
        self.newest = trajectories
        if self.index:
            table = to_table(trajectories, run="", searcher=0, seq=step)
            ordered = sorted(trajectories, key=lambda it: (it.prompt_id, it.slot))
            self.rows.update(zip(table["trajectory_id"].to_pylist(), ordered, strict=True))
            self.index.extend(step, [(f"0/{step}", table)], step=step)

    def draw(self, step: int) -> Sequence[Trajectory]:
        if self.index is None:
            return self.newest
        return [self.rows[draw.trajectory_id] for draw in self.index.draw(step)]


def checked_lag(config: Config) -> int:
    """Return `sync.lag`. Raise ConfigError for settings that would have no effect here."""
    for name, value in HELD.items():
        section, field = name.split(".")
        if (found := getattr(getattr(config, section), field)) != value:
            raise ConfigError(f"{name} must be {value!r} for a run in memory, got {found!r}")
    if config.sync.lag is None:
        raise ConfigError("sync.lag must be set for a run in memory, got None")
    return config.sync.lag


_first_rounds: dict[str, Sequence[Trajectory]] = {}
"""Rounds that the base policy generated, by the settings that determine them."""


def _round(config: Config, searcher: Searcher, round: int) -> Sequence[Trajectory]:
    key = repr((round, config.seed, config.search, config.task, config.model, config.training.compute_dtype))
    if searcher.adoption.version == START and key in _first_rounds:
        return _first_rounds[key]
    searcher.ask(searcher.rounds.groups(round))
    while searcher.in_flight:
        searcher.step()
    trajectories = searcher.assembly.trajectories(searcher.in_flight.next_shard())
    if searcher.adoption.version == START:
        _first_rounds[key] = trajectories
    return trajectories


def _task_of(config: Config) -> Task:
    task = get_task(config.task)
    if isinstance(task, UsesModels):
        task.load(lambda setting, place: model_here(setting, place, config, lambda status, **progress: None))
    return task


def start_of(config: Config) -> Path:
    """Return the folder of the base policy: the one that `model.path` names, or the one that the task makes. A
    converted GGUF file and what a task makes are in the cache that other runs use too."""
    if config.model.path:
        folder = Path(model_here("model.path", config.model.path, config, lambda status, **progress: None))
        if not (folder / "model.safetensors").is_file():
            raise ConfigError(f"model.path must be a folder with model.safetensors, got {config.model.path!r}")
        return folder
    maker = policy_maker(get_task(config.task))
    folder = cache_folder("base-policies") / sha256(f"{maker.recipe()}:{config.seed}".encode()).hexdigest()[:16]
    if not folder.exists():
        with TemporaryDirectory(dir=folder.parent, prefix=".making-") as making:
            made = Path(making) / "policy"
            maker.base_policy(made, seed=config.seed, report=lambda what, share: None)
            if not folder.exists():  # a run may have made it meanwhile
                made.rename(folder)
    return folder


def _searcher(config: Config, task: Task, policy: Policy, start: Path, weights: Weights) -> Searcher:
    prompts = task.prompts("train", [], policy.tokenizer, max_tokens=config.search.max_prompt_tokens)
    return Searcher(
        0,
        config,
        stream=PromptStream(prompts, seed=config.seed, searcher=0, searchers=1, shuffle=config.search.shuffle),
        task=task,
        generator=_generator(config),
        scorer=PolicyScorer(Policy.load(start), START, compute_dtype=config.training.compute_dtype),
        reference=START,
        log=fakes.Log(),
        versions=weights,  # pyright: ignore[reportArgumentType]  # the searcher only loads versions
        lease=fakes.Lease(),
        events=fakes.Events(),
    )


def make_scores(config: Config) -> Examine:
    """Return an examination with held-out prompts, which returns the scores `greedy` and `sampled`."""
    task, versions = _task_of(config), count()
    evaluator = _evaluator(config, task, Policy.load(start_of(config)))

    def score(folder: Path) -> Mapping[str, float]:
        version = Version(next(versions), 1)
        evaluator.generator.adopt(folder, version)
        return {it.metric: it.value for it in evaluator.evaluate(version, 0).scores}

    return score


def _evaluator(config: Config, task: Task, policy: Policy) -> Evaluator:
    prompts = task.prompts("test", [], policy.tokenizer, max_tokens=config.search.max_prompt_tokens)
    return Evaluator(
        config,
        prompts=prompts[: config.evaluation.prompts],
        task=task,
        generator=_generator(config),
        versions=None,  # pyright: ignore[reportArgumentType]  # only its scores are used
        evaluations=None,  # pyright: ignore[reportArgumentType]
        lease=fakes.Lease(),
        events=fakes.Events(),
    )


def _generator(config: Config) -> TransformersGenerator:
    return TransformersGenerator(
        dtype=config.model.publish_dtype,
        batch_responses=config.search.batch_responses,
        max_response_tokens=config.search.max_response_tokens,
    )
