"""A run in, assembled roles out: the only place where implementations are chosen."""

import tempfile
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import Any

from storage.attempts import claim_attempt
from storage.cache import cache_folder
from storage.checkpoints import Checkpoints
from storage.evaluations import Evaluations
from storage.events import Events
from storage.leases import HeldLease
from storage.ledger import ParquetLedger
from storage.metric_log import open_metric_log
from storage.prompts import read_prompts, write_prompts
from storage.replay_buffer import DuckReplayBuffer
from storage.rows import read_rows
from storage.run import Run
from storage.trajectories import Trajectories
from storage.versions import Versions
from tba.config import Config, parse
from tba.errors import ConfigError
from tba.evaluator import Evaluator
from tba.generation import TransformersGenerator
from tba.interfaces import PolicyMaker, Task
from tba.policy import Policy, PolicyScorer
from tba.searcher import PromptStream, Searcher, await_reference
from tba.tasks import get_task
from tba.trainer import Trainer
from tba.training_state import TrainingState


def run_searcher(run: Run, index: int, lease: HeldLease, events: Events) -> None:
    config, task = _config_and_task(run)
    versions = Versions(run)
    reference = await_reference(versions, lease, deadline=config.limits.data_deadline)
    searcher = Searcher(
        index,
        seed=config.seed,
        config=config.search,
        stream=PromptStream(
            read_prompts(run, "train"),
            seed=config.seed,
            searcher=index,
            searchers=config.search.searchers,
            shuffle=config.search.shuffle,
        ),
        task=task,
        generator=_generator(config),
        scorer=PolicyScorer(_load_policy(config, str(versions.load(reference))), reference),
        log=Trajectories(run),
        versions=versions,
        lease=lease,
        events=events,
    )
    searcher.run()


def run_trainer(run: Run, lease: HeldLease, events: Events) -> None:
    config, task = _config_and_task(run)
    attempt = claim_attempt(run)
    checkpoints = Checkpoints(run)
    with tempfile.TemporaryDirectory(prefix="tba-") as scratch:
        state = None
        if attempt.continues is not None:
            folder = checkpoints.load(attempt.continues.number, attempt.continues.attempt)
            policy, state = _load_policy(config, str(folder)), TrainingState.load(folder)
        else:
            policy = _load_policy(config, _start_of(config, task, lease))
            _store_prompts(run, config, task, policy.tokenizer)
        with closing(open_metric_log(run, config.metrics)) as metrics:
            trainer = Trainer(
                config,
                attempt=attempt.number,
                policy=policy,
                buffer=_buffer(run, config, attempt.number, events),
                ledger=ParquetLedger(run, attempt.number),
                versions=Versions(run),
                checkpoints=checkpoints,
                metrics=metrics,
                lease=lease,
                events=events,
                scratch=Path(scratch),
            )
            if state is not None:
                trainer.resume(state)
                events.write("resumed", f"attempt {attempt.number} goes on after step {state.step}")
            trainer.run()


def run_evaluator(run: Run, lease: HeldLease, events: Events) -> None:
    config, task = _config_and_task(run)
    versions = Versions(run)
    await_reference(versions, lease, deadline=config.limits.data_deadline)
    evaluator = Evaluator(
        config,
        prompts=read_prompts(run, "test")[: config.evaluation.prompts],
        task=task,
        generator=_generator(config),
        versions=versions,
        evaluations=Evaluations(run),
        lease=lease,
    )
    evaluator.run()


def _config_and_task(run: Run) -> tuple[Config, Task]:
    config = parse(run.config)
    return config, get_task(config.task)


def _generator(config: Config) -> TransformersGenerator:
    return TransformersGenerator(
        device=config.model.device,
        dtype=config.model.publish_dtype,
        batch_responses=config.search.batch_responses,
        max_response_tokens=config.search.max_response_tokens,
        trust_remote_code=config.model.trust_remote_code,
    )


def _load_policy(config: Config, path: str) -> Policy:
    model = config.model
    return Policy.load(
        path,
        dtype=model.dtype,
        device=model.device,
        revision=model.revision,
        trust_remote_code=model.trust_remote_code,
    )


def _buffer(run: Run, config: Config, attempt: int, events: Events) -> DuckReplayBuffer:
    sampling, training = config.sampling, config.training
    return DuckReplayBuffer(
        run,
        seed=config.seed,
        slots=training.prompts_per_step,
        responses=training.responses_per_prompt,
        recent_share=sampling.recent_share,
        inv_temp=sampling.inv_temp,
        capacity=sampling.capacity,
        sampler_sql=run.sampler_sql,
        step_of_version=lambda version: config.step_of_sync(version.number),
        attempt=attempt,
        events=events,
    )


def _start_of(config: Config, task: Task, lease: HeldLease) -> str:
    """Where the policy before training lies: as configured, or made by the task and cached by its recipe."""
    if config.model.path:
        return config.model.path
    if not isinstance(task, PolicyMaker):
        raise ConfigError(f"model.path is empty, and task {task.name!r} makes no policy of its own")
    recipe = f"{task.recipe()}:{config.seed}"
    folder = cache_folder("base-policies") / sha256(recipe.encode()).hexdigest()[:16]
    if not folder.exists():
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as making:
            made = Path(making) / "policy"
            task.base_policy(made, seed=config.seed, report=lambda what, share: lease.tell(what, share=share))
            made.rename(folder)
    return str(folder)


def _store_prompts(run: Run, config: Config, task: Task, tokenizer: Any) -> None:
    for split, given in (("train", config.task.train), ("test", config.task.test)):
        source = given or task.source(split)
        rows = read_rows(source) if source else []
        write_prompts(run, split, task.prompts(split, rows, tokenizer, max_tokens=config.search.max_prompt_tokens))
