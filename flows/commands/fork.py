"""`tba fork`: create a run that goes on from a past step of another run, its parent. The fork shares what the parent
had stored by that step."""

import argparse
import logging
import sys
from collections.abc import Callable, Mapping
from itertools import count
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from flows.commands.arguments import DONE, RUN_HELP, add_gpus, add_set, explain, open_run, read_changes
from flows.commands.run import supervise
from flows.planning import create, fit_to_gpus, resolve
from flows.planning.plan_table import assigned
from flows.planning.run_summary import newest_sync
from flows.progress import bar
from flows.roles.threads import use_threads
from storage import layout
from storage.log.ledger import read_entries
from storage.log.sync_records import read_chain
from storage.objects import records
from storage.objects.open_store import open_store
from storage.runs.attempts import chain, newest_attempt
from storage.runs.control import change_state
from storage.runs.forks import is_kept, register, settle, unregister
from storage.runs.inheritance import Parent
from storage.runs.retention import given_up_payloads, in_the_way
from storage.runs.run import Run
from storage.weights.checkpoints import Checkpoints
from tba.config import Config, parse, same_moments
from tba.errors import AlreadyExists, ConfigError, Damaged, Missing
from tba.types import Version

if TYPE_CHECKING:
    from flows.roles.repeat_steps import RestoredTrainer

log = logging.getLogger(__name__)

FIXED = (
    "task", "model.path", "model.revision", "model.lora_rank", "model.lora_alpha", "model.lora_targets",
    "search.temperature", "search.prompts_from", "search.prompts_where",
)  # fmt: skip
"""Settings that a fork shares with its parent and cannot change. The inherited trajectories were asked for, generated
and scored with these settings, and the inherited checkpoint was written with them."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    explain(
        parser,
        "The fork is stored beside its parent and shares what the parent had stored by then. Nothing is copied, and\n"
        "the parent does not change. With --replay the fork has no searchers and trains on the recorded trajectories,\n"
        "so another sampler, beta or number of steps per sync can be tried without generating again.",
        "examples:\n"
        "  tba fork first --step 200 --set training.learning_rate=1e-4\n"
        "  tba fork first --step 0 --replay --name uniform --set sampling.recent_share=0",
    )
    parser.add_argument("run", metavar="RUN", help=RUN_HELP)
    parser.add_argument(
        "--step", type=int, required=True, metavar="N", help="a step at which a sync took place; 0 is the start"
    )
    add_set(parser)
    add_gpus(parser, "change settings so that the fork fits by its plan of memory; settings of --set stay")
    parser.add_argument("--replay", action="store_true", help="train on the recorded trajectories only")
    parser.add_argument("--name", help="name of the fork (default: the parent's and the step)")
    parser.add_argument(
        "--no-start", action="store_true", help="create the run without starting it; `tba resume` starts it"
    )


def command(options: argparse.Namespace) -> int:
    parent = open_run(options.run)
    changes = read_changes(options)

    def fit(config: Config) -> Mapping[str, Any]:
        return fit_fork(config, options.gpus, changes, replay=options.replay, starts=not options.no_start)

    run = fork(parent, options.step, changes, name=options.name, replay=options.replay, fit=fit)
    if options.no_start:
        print(run.url)
        return DONE
    return supervise(run)


def fit_fork(
    config: Config, asked: str | None, changes: Mapping[str, Any], *, replay: bool, starts: bool
) -> Mapping[str, Any]:
    """Return the changes of settings with which a fork fits on the GPUs `asked`, and print them. Without `asked`, print
    a warning if a fork that starts does not fit on the GPUs of this machine."""
    if not asked and not starts:
        return {}
    keep = {*changes, *kept_by_forks(config)}
    planned = fit_to_gpus.with_searchers(config, 0) if replay else config
    gpus, fitted = fit_to_gpus.fit(planned, asked, keep, runs_here=starts)
    if fitted:
        print(f"to fit on {gpus}: {assigned(fitted)}", file=sys.stderr)
    elif warning := fit_to_gpus.warning(planned, gpus):
        print(f"warning: {warning}", file=sys.stderr)
    return fitted


def kept_by_forks(config: Config) -> tuple[str, ...]:
    """Return the settings that no plan of memory may change in a fork. A fork in step with its parent must have as many
    searchers."""
    return FIXED if config.sync.lag is None else (*FIXED, "search.searchers")


def fork(
    parent: Run,
    step: int,
    changes: Mapping[str, Any],
    *,
    name: str | None = None,
    replay: bool = False,
    fit: Callable[[Config], Mapping[str, Any]] = lambda config: {},
) -> Run:
    """Create the fork without starting it, by default under the first free name. `fit` returns further changes of the
    settings. Raise ConfigError, with the reason, if the fork is not possible."""
    if name and open_store(layout.run_url(parent.root, name)).exists(layout.RUN):
        raise _exists_error(parent, name)
    before = parse(parent.config)
    origin = _origin(parent, step, replay=replay)
    config, sampler = _settings(parent, before, origin, changes)
    if fitted := fit(config):
        config, sampler = _settings(parent, before, origin, {**changes, **fitted})
    _check_steps(parent, origin, config)
    _check_payloads(parent, origin, config)
    trainer = _repeat_steps(parent, origin) if origin.rebuilt else None
    run = _make(parent, origin, config, sampler, name)
    if trainer:
        trainer.save(run, origin.attempt)
    change_state(run, desired="run", searchers=0 if replay else config.search.searchers, why="forked")
    return run


def _make(parent: Run, origin: Parent, config: Config, sampler: str, given: str | None) -> Run:
    """Create the fork under the given name. Without a name, take the first free default name, and try the next one if
    somebody else takes that name first."""
    while True:
        name = given or default_name(parent, origin.step)
        registration = register(parent, name, origin)
        try:
            # Check again: after the registration, nothing that the fork draws can be given up.
            _check_payloads(parent, origin, config)
            run = Run.create(
                parent.root,
                name,
                config=config.to_dict(),
                sampler_sql=sampler,
                code_version=create.code_version(),
                created_by="tba fork",
                parent=origin,
            )
        except AlreadyExists:
            unregister(parent, registration)
            if given:
                raise _exists_error(parent, name) from None
            continue
        except ConfigError:  # raised before anything of the run was stored
            unregister(parent, registration)
            raise
        settle(parent, name, registration)
        return run


def _exists_error(parent: Run, name: str) -> ConfigError:
    return ConfigError(f"--name: run {name!r} exists already beside {parent.name!r}")


def _origin(parent: Run, step: int, *, replay: bool) -> Parent:
    """Return the point at which the fork leaves its parent. Raise ConfigError unless a sync follows this step and its
    ledger is stored, because only then everything that a fork needs is stored."""
    _check_parent(parent, step)
    synced = read_chain(parent)
    steps = {record.step: record.sync for record in synced}
    attempts = newest_attempt(parent)
    spans = chain(parent, attempts)
    newest = newest_sync(parent, spans)
    closed = {step: sync for step, sync in steps.items() if sync <= newest}
    if step not in closed:
        near = sorted(closed, key=lambda it: (abs(it - step), it))[:2]
        known = f"; near it are steps {' and '.join(map(str, sorted(near)))}" if near else ""
        known += f", and the last is step {max(closed)}" if closed and step > max(closed) else ""
        raise ConfigError(
            f"--step: must be a step of {parent.name} that a sync follows and whose ledger is stored, got {step}{known}"
        )
    sync = closed[step]
    attempt = next(span.attempt for span in spans if span.covers(sync))
    checkpoint = Version(sync, attempt)
    return Parent(
        run=parent.name,
        step=step,
        sync=sync,
        attempt=attempt,
        attempts=attempts,
        replays=synced[-1].sync if replay else None,
        rebuilt=bool(sync) and not _can_start(parent, checkpoint),
    )


def _can_start(parent: Run, checkpoint: Version) -> bool:
    """True if a fork can start from this checkpoint of its parent. A damaged checkpoint is made again, just as a
    missing one. Files in an object store are checked by name and size only, so that this machine need not have room for
    them."""
    try:
        if not is_kept(parent, checkpoint):
            return False
        Checkpoints(parent).check(checkpoint)
    except (Missing, Damaged) as error:
        log.warning("%s: checkpoint %s cannot be the start of a fork: %s", parent.name, checkpoint, error)
        return False
    return True


def _check_parent(parent: Run, step: int) -> None:
    """Raise ConfigError if the parent cannot be forked at this step. A parent that is a fork itself can be forked at
    its own start or later; earlier steps belong to its own parent. A replay cannot be forked at all."""
    older = parent.parent
    if older and older.replays is not None:
        raise ConfigError(
            f"RUN: {parent.name} replays what {older.run} recorded: fork {older.run} with its settings instead"
        )
    if older and step < older.step:
        raise ConfigError(
            f"--step: {parent.name} is a fork that goes on after step {older.step}; step {step} is one of "
            f"{older.run}'s: `tba fork {older.run} --step {step}`"
        )


def _settings(parent: Run, before: Config, origin: Parent, changes: Mapping[str, Any]) -> tuple[Config, str]:
    """Return the parent's settings and sampler with the changes applied. Raise ConfigError if a fork cannot have
    them."""
    for key in changes:
        if key.startswith(FIXED):
            raise _shared(key)
        if key.partition(".")[0] == "start":
            raise ConfigError(f"--set: {key} is set by --step and cannot be changed")
    start = {"start.sync": origin.sync, "start.step": origin.step}
    steps = changes.get("training.steps", before.training.steps)
    if str(steps).isdecimal() and int(steps) <= origin.step:
        raise ConfigError(
            f"--set: training.steps must be > {origin.step}, the step after which the fork starts, got {steps}: "
            "give a larger number with --set training.steps=…"
        )
    config = resolve.checked(before.replace({**changes, **start}))
    for name in FIXED:
        if attrgetter(name)(config) != attrgetter(name)(before):  # a change may have replaced a whole section
            raise _shared(name)
    if origin.step and not same_moments(before.training.optimizer, config.training.optimizer):
        raise ConfigError(
            f"--set: training.optimizer is {before.training.optimizer!r} in the parent, and its optimizer "
            f"state cannot be converted to or from 8 bits, got {config.training.optimizer!r}"
        )
    if config.objective.needs_values and not before.search.value_samples:
        raise ConfigError(
            f"--set: objective.name {config.objective.name!r} needs values of steps, and {parent.name} stored none: "
            "its search.value_samples is 0"
        )
    if config.objective.needs_reference and (lacking := _stored_without_reference(parent, origin)):
        named = next((f"{key}={value}" for key, value in changes.items() if key.startswith("objective")), "objective")
        raise ConfigError(
            f"--set: {named}: this objective needs log-probabilities under the reference, and {lacking} stored "
            "trajectories without them, because its search.reference_logps is 'needed' and its objective needs none: "
            "start a new run with this objective"
        )
    if config.sync.lag is not None and origin.step and origin.replays is None:
        _check_in_step(before, config)
    return config, resolve.read_sampler(config) if "sampling.sql" in changes else parent.sampler_sql


def _stored_without_reference(run: Run, origin: Parent) -> str:
    """Return the name of the run, or of the run that it was forked from, and so on, that stored trajectories without
    log-probabilities under the reference which a fork inherits. Return "" if none did."""
    last = origin.newest_record
    admitted = {record.sync for record in read_chain(run) if record.shards and record.sync <= last}
    while True:
        older = run.parent
        first = older.newest_record + 1 if older else 0
        if not parse(run.config).stores_reference_logps and any(first <= sync <= last for sync in admitted):
            return run.name
        if older is None:
            return ""
        run, last = Run.open(layout.run_url(run.root, older.run)), first - 1


def _check_in_step(before: Config, config: Config) -> None:
    """Raise ConfigError if a fork that sets `sync.lag` cannot continue the rounds of its parent. With `sync.lag`,
    sync n admits round n of each searcher. The inherited rounds must follow this rule too, so the parent must set
    `sync.lag` and have as many searchers."""
    if before.sync.lag is None:
        raise ConfigError(
            "--set: sync.lag can be set in a fork only if the parent sets it too, or with --step 0, or with --replay"
        )
    if before.search.searchers != config.search.searchers:
        raise ConfigError(
            f"--set: search.searchers must be {before.search.searchers}, as in the parent, because sync.lag is set, "
            f"got {config.search.searchers}"
        )


def _shared(key: str) -> ConfigError:
    return ConfigError(f"--set: {key} is shared with the parent and cannot be changed in a fork")


def _check_steps(parent: Run, origin: Parent, config: Config) -> None:
    if origin.replays is None:
        return
    recorded = records.read(parent.store, layout.sync(origin.replays), "step")["step"]
    if config.training.steps > recorded:
        raise ConfigError(
            f"--set: training.steps: {parent.name} has recorded {recorded} steps, and a replay goes no further, got "
            f"{config.training.steps}: --set training.steps={recorded}"
        )


def _check_payloads(parent: Run, origin: Parent, config: Config) -> None:
    """Raise ConfigError if a retention record has given up tokens that the fork may draw."""
    if gone := in_the_way(parent, origin.sync, origin.newest_record):
        raise ConfigError(
            f"--step: {gone} gave up tokens that a fork of {parent.name} from step {origin.step} may draw; a fork can "
            f"start from step {gone.payloads.step} or later"
        )
    for it in given_up_payloads(parent):
        if it.payloads.last_sync > origin.sync:
            continue
        for name, theirs, ours in (
            ("evict", it.payloads.eligibility.evict, config.sampling.evict),
            ("copies", it.payloads.eligibility.copies, config.sampling.copies),
            ("max_age", it.payloads.eligibility.max_age, config.sampling.max_age),
        ):
            if ours != theirs:
                raise ConfigError(
                    f"--set: sampling.{name} must be {theirs!r}, because {it} gave up the tokens of trajectories that "
                    f"cannot be drawn with this value, got {ours!r}"
                )
        if config.sampling.capacity > (capacity := it.payloads.eligibility.capacity):
            raise ConfigError(
                f"--set: sampling.capacity must be at most {capacity}, because {it} gave up the tokens of trajectories "
                f"beyond this capacity, got {config.sampling.capacity}"
            )


def _repeat_steps(parent: Run, origin: Parent) -> "RestoredTrainer":
    """Repeat gradient steps up to the step where the fork begins, and return the trainer's state. Begin at the newest
    older checkpoint, or at the policy before training. Raise Damaged if the steps can be repeated bit for bit (on a
    CPU, with one rank) but the weights differ from the digest in the ledger."""
    use_threads(parse(parent.config))
    from flows.roles.repeat_steps import restore_trainer

    trainer = restore_trainer(parent, origin.step + 1)
    if trainer.step < origin.step:  # otherwise the parent has an intact checkpoint of this step
        log.info(
            "there is no intact checkpoint of step %d: repeating steps %d to %d",
            origin.step,
            trainer.step + 1,
            origin.step,
        )
    with bar(f"repeating the steps up to {origin.step}") as tell:
        for repeated in trainer.repeat_until(origin.step):
            tell(repeated.step, origin.step)
    wanted = read_entries(parent, origin.sync, origin.attempt)[-1].step["weights_sha256"]
    if trainer.repeatable and (now := trainer.weights_sha256(like=wanted)) != wanted:
        raise Damaged(
            f"{parent.name}: after repeating the steps up to {origin.step}, the weights have sha256 "
            f"{now[:12]}…, but the ledger has {wanted[:12]}…; on another kind of machine the last "
            "bits can differ: fork on a machine like that of the run"
        )
    return trainer


def default_name(parent: Run, step: int) -> str:
    """Return the first free name for a fork: the name of the parent and the step, with a number from 2 on if others are
    taken."""
    base = f"{parent.name}-{step}"
    names = (base if n == 1 else f"{base}-{n}" for n in count(1))
    return next(name for name in names if not open_store(layout.run_url(parent.root, name)).exists(layout.RUN))
