"""Assemble the roles of a run and run them. All implementations are chosen here, except the trainer's replay buffer:
flows/roles/buffer_process.py makes it in a process without torch."""

import logging
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Thread

import torch

from flows.roles import starting_checkpoint
from flows.roles.buffer_process import BufferProcess
from flows.roles.engines import evaluation_sampling, open_generator, search_sampling
from flows.roles.gpu_shifts import GpuShifts
from flows.roles.leading_rank import lead_ranks, with_ranks
from flows.roles.model_loading import Tell, find_adapter, first_device, load_policy, load_start, model_at
from flows.roles.number_format import arithmetic_of, tell_compute_dtype
from flows.roles.prompt_intake import store_prompts, stream_of_prompts
from storage.local_files.scratch import scratch_folder
from storage.log.ledger import ParquetLedger, find_faults
from storage.log.prompts import read_prompts
from storage.log.trajectories import Trajectories
from storage.maintenance.resume_check import refuse_damage
from storage.metrics.metric_log import open_metric_log
from storage.runs.arithmetic import note_arithmetic
from storage.runs.attempts import Attempt, chain
from storage.runs.events import Events
from storage.runs.held_lease import HeldLease
from storage.runs.run import Run
from storage.weights.checkpoints import Checkpoints
from storage.weights.evaluations import Evaluations
from storage.weights.memory_versions import MemoryVersions, open_memory
from storage.weights.versions import Versions
from tba.config import Config, parse
from tba.distributed.world import World
from tba.errors import Stopped, StorageError
from tba.generation.transformers_generator import TransformersGenerator
from tba.interfaces import Measures, Task, UsesModels
from tba.models.adapters import Adapter
from tba.models.folder import sizes_of, weight_files
from tba.models.policy import Policy, PolicyScorer
from tba.runtime.parking import Parking
from tba.runtime.shifts import NO_SHIFTS, LendsModels, Shift
from tba.search.evaluator import Evaluator
from tba.search.searcher import Searcher, await_reference
from tba.tasks.guard import asking
from tba.tasks.registry import get_task
from tba.train.learner import Learner
from tba.train.sync_writer import SyncWriter
from tba.train.trainer import Trainer
from tba.types import Version

log = logging.getLogger(__name__)


STARTING = 120.0  # minimum deadline for an answer of the buffer process, in seconds: the process may have to start


def run_searcher(run: Run, index: int, lease: HeldLease, events: Events) -> None:
    config, task = _config_and_task(run)
    shift = _open_shifts(run, config, lease, check=lease.check)
    _load_models(task, run, config, lease.tell, shift)
    with _open_versions(run, config) as versions:
        reference = await_reference(versions, lease, deadline=config.limits.data_deadline)
        shift.begin()
        adapter = find_adapter(run, config, lease.tell)
        size = partial(_parameters, versions, reference, adapter)
        with closing(open_generator(config, events, search_sampling(config), size, adapter)) as generator:
            scorer = None
            if config.stores_reference_logps:
                scorer = scorers(config, adapter, events)(versions.load(reference), reference)
            shift.hold(generator, scorer)
            shift.end()
            searcher = Searcher(
                index,
                config,
                stream=stream_of_prompts(config, read_prompts(run, "train"), index),
                task=task,
                generator=generator,
                scorer=scorer,
                reference=reference,
                log=Trajectories(run),
                versions=versions,
                lease=lease,
                events=events,
                shift=shift,
            )
            searcher.run()


def run_trainer(run: Run, lease: HeldLease, events: Events, world: World | None = None) -> None:
    config, task = _config_and_task(run)
    config = with_ranks(config, world)
    # If another life took over while this life imported libraries, this life must not claim the newest attempt.
    with suppress(Stopped):  # a stop takes effect at the next sync
        lease.check()
    refuse_damage(run, whole=False)
    attempt, checkpoint = starting_checkpoint.claim(run, config, lease, events)
    Thread(target=_tell_of_ledger, args=(run, attempt, events), daemon=True).start()
    shift = _open_shifts(run, config, lease, check=partial(_check_unless_stopped, lease))
    # What the trainer writes inside the folder of a local run can be stored as links, without another copy.
    with (
        scratch_folder(run.folder) as scratch,
        _open_versions(run, config) as versions,
        lead_ranks(run, config, attempt.number, world, lease, events) as leading,
    ):
        shift.begin()
        if checkpoint is not None:
            adapter = find_adapter(run, config, lease.tell)
            policy = load_policy(config, adapter, checkpoint, device=first_device(config))
        else:
            policy = load_start(run, config, lease.tell, device=first_device(config))
            if not run.parent:
                store_prompts(run, config, task, policy.tokenizer, events)
        _check_room(config, versions, policy)
        deadline = max(config.limits.data_deadline, STARTING)
        learner, state = leading.learner(policy, checkpoint, scratch=scratch)
        with (
            closing(open_metric_log(run, config.metrics)) as metrics,
            BufferProcess(run, attempt.number, lease.life, deadline=deadline) as buffer,
        ):
            shift.hold(learner.parking)
            syncs = SyncWriter(
                config,
                attempt=attempt.number,
                ledger=ParquetLedger(run, attempt.number),
                versions=versions,
                checkpoints=Checkpoints(run),
                lease=lease,
                scratch=scratch,
                version_scratch=versions.memory,
            )
            trainer = Trainer(
                config,
                learner=learner,
                buffer=buffer,
                syncs=syncs,
                metrics=metrics,
                lease=lease,
                events=events,
                shift=shift,
            )
            tell_compute_dtype(config, learner.policy, events)
            note_arithmetic(run, attempt.number, arithmetic_of(config, learner.policy))
            tell_padding(learner, events)
            if state is not None:
                trainer.resume(state)
                events.write("resumed", f"attempt {attempt.number} goes on after step {state.step}")
            trainer.run()


def run_evaluator(run: Run, lease: HeldLease, events: Events) -> None:
    config, task = _config_and_task(run)
    shift = _open_shifts(run, config, lease, check=lease.check)
    _load_models(task, run, config, lease.tell, shift)
    versions = Versions(run)
    reference = await_reference(versions, lease, deadline=config.limits.data_deadline)
    adapter = find_adapter(run, config, lease.tell)
    needs_reference = isinstance(task, Measures) and task.needs_reference
    sampling = evaluation_sampling(config, reads_logps=needs_reference)
    scorer, size = scorers(config, adapter, events), partial(_parameters, versions, reference, adapter)
    shift.begin()
    with closing(open_generator(config, events, sampling, size, adapter)) as generator:
        reference_scorer = scorer(versions.load(reference), reference) if needs_reference else None
        shift.hold(generator, reference_scorer)
        shift.end()
        evaluator = Evaluator(
            config,
            prompts=read_prompts(run, "test")[: config.evaluation.prompts],
            task=task,
            generator=generator,
            reference=reference_scorer,
            trainers_scorer=None if isinstance(generator, TransformersGenerator) else scorer,
            versions=versions,
            evaluations=Evaluations(run),
            lease=lease,
            events=events,
            shift=shift,
        )
        evaluator.run()


def tell_padding(learner: Learner, events: Events) -> None:
    if why := learner.padded_because:
        message = f"responses are padded, and each is read with its own copy of the prompt: {why} (docs/models.md)"
        events.write("trainer-pads", message, why=why)
    if why := learner.attention_pads_because:
        _tell_attention(why, events)


def _tell_attention(why: str, events: Events) -> None:
    message = f"attention reads packed rows in padded calls: {why} (docs/models.md)"
    events.write("attention-pads", message, why=why)


def _tell_of_ledger(run: Run, attempt: Attempt, events: Events) -> None:
    """Verify the ledger of all syncs before `attempt`, and write an event for each of its objects that is damaged or
    missing. This runs in a thread of its own, because no gradient step depends on it."""
    newest = attempt.continues.number if attempt.continues else 0
    try:
        spans = [span for span in chain(run, attempt.number) if span.attempt != attempt.number]
        names = [Version(sync, span.attempt) for sync in range(1, newest + 1) for span in spans if span.covers(sync)]
        for fault in find_faults(run, names):
            events.write("ledger-damaged", fault, severity="error")
    except StorageError as error:
        log.warning("the ledger could not be verified: %s", error)


def _config_and_task(run: Run) -> tuple[Config, Task]:
    config = parse(run.config)
    return config, get_task(config.task)


def _check_room(config: Config, versions: Versions, policy: Policy) -> None:
    if isinstance(versions, MemoryVersions) and not config.model.lora_rank:
        each: int = getattr(torch, config.model.publish_dtype).itemsize
        size = each * sum(it.numel() for it in policy.model.parameters())
        versions.check_room(size, differences=config.sync.whole_every > 1)


@contextmanager
def _open_versions(run: Run, config: Config) -> Iterator[Versions]:
    if config.sync.transport == "storage":
        yield Versions(run)
    else:
        with open_memory(run) as versions:
            yield versions


def _open_shifts(run: Run, config: Config, lease: HeldLease, *, check: Callable[[], None]) -> Shift:
    if not config.model.gpu_shifts:
        return NO_SHIFTS
    return GpuShifts(run.url, lease.role, check=check, tell=lease.tell_status)


def _check_unless_stopped(lease: HeldLease) -> None:
    """Raise Superseded if another life has taken over. A trainer that works stops only after a sync, so a
    stop is not raised."""
    with suppress(Stopped):
        lease.check()


def _load_models(task: Task, run: Run, config: Config, tell: Tell, shift: Shift = NO_SHIFTS) -> None:
    if isinstance(task, UsesModels):
        shift.begin()
        tell("loading the models that the task scores with")
        with asking(task, "load"):
            task.load(lambda setting, place: model_at(setting, place, run, config, tell))
        if isinstance(task, LendsModels):
            shift.hold(Parking(task.loaded_models))
        shift.end()


def _parameters(versions: Versions, reference: Version, adapter: Adapter | None) -> int:
    """Return the number of parameters of the policy, without those of adapters."""
    folder = adapter.base if adapter else versions.load(reference)
    return sum(sum(sizes_of(file).values()) for file in weight_files(folder))


def scorers(config: Config, adapter: Adapter | None, events: Events) -> Callable[[Path, Version], PolicyScorer]:
    """Return a function that loads scorers. The first one whose attention pads is told in an event, as all have the
    same architecture."""
    told = list[str]()

    def load(folder: Path, version: Version) -> PolicyScorer:
        scorer = _scorer(config, adapter, folder, version)
        if (why := scorer.attention_pads_because) and not told:
            told.append(why)
            _tell_attention(why, events)
        return scorer

    return load


def _scorer(config: Config, adapter: Adapter | None, folder: Path, version: Version) -> PolicyScorer:
    policy = load_policy(config, adapter, folder)
    return PolicyScorer(policy, version, compute_dtype=config.training.compute_dtype, owns=True)


def open_scorer(run: Run, config: Config, task: Task) -> PolicyScorer:
    """Return a scorer with the reference policy, and load the models of the task. Both together score responses from
    elsewhere as searchers score their own. The run must have published its reference."""

    def tell(status: str, **progress: float) -> None:
        log.info(status)

    _load_models(task, run, config, tell)
    versions = Versions(run)
    reference = versions.reference()
    assert reference is not None
    return _scorer(config, find_adapter(run, config, tell), versions.load(reference), reference)
