"""A run in, assembled roles out: the place where implementations are chosen, but for the trainer's replay buffer, which
flows/roles/buffer_process.py makes in a process without torch."""

import json
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from hashlib import sha256
from numbers import Integral
from pathlib import Path
from threading import Thread
from typing import Any, Protocol

from flows.roles import starting_checkpoint
from flows.roles.buffer_process import Reader
from flows.roles.engines import evaluation_sampling, open_generator, search_sampling
from flows.roles.rank import leading
from storage.local_files.scratch import scratch_folder
from storage.local_files.shared_cache import shared_copy
from storage.log.ledger import ParquetLedger, find_faults
from storage.log.prompts import has_prompts, read_prompts, write_prompts
from storage.log.trajectories import Trajectories
from storage.maintenance.resume_check import refuse_damage
from storage.metrics.metric_log import open_metric_log
from storage.objects.datasets import read_rows
from storage.objects.open_store import open_store
from storage.objects.store import Store
from storage.queries.difficulty import ask
from storage.runs.attempts import Attempt, chain
from storage.runs.events import Events
from storage.runs.leases import HeldLease
from storage.runs.run import Run
from storage.weights.checkpoints import Checkpoints
from storage.weights.evaluations import Evaluations
from storage.weights.versions import Versions
from tba.config import Config, parse
from tba.errors import ConfigError, Damaged, DataError, Stopped, StorageError
from tba.generation.transformers_generator import TransformersGenerator
from tba.interfaces import Measures, ReadsFields, Task, UsesModels
from tba.models.adapters import Adapter, files_sha256, merge
from tba.models.file_checks import weight_names
from tba.models.location import check_place
from tba.models.policy import Policy, PolicyScorer, Snapshot
from tba.models.pretrained import local_folder
from tba.models.trainable import check_first_policy
from tba.search.evaluator import Evaluator
from tba.search.prompt_stream import PromptStream
from tba.search.searcher import Searcher, await_reference
from tba.tasks import get_task, policy_maker
from tba.tasks.guard import asking
from tba.train.trainer import Trainer
from tba.train.training_state import TrainingState
from tba.types import Prompt, Version

log = logging.getLogger(__name__)

MODEL_FILES = (".json", ".safetensors", ".txt", ".model", ".jinja", ".py")
"""What is fetched of a model's folder: weights as safetensors only, whatever else tokenizers and models are made of."""

_BASES = 1000  # policies made by tasks that stay in the cache: without its base an adapter is of no use

STARTING = 120.0  # seconds that the trainer's reader has for an answer at least: it may have to start first


class Tell(Protocol):
    """Is told what is being done, and the share that is done."""

    def __call__(self, status: str, **progress: float) -> None: ...


def run_searcher(run: Run, index: int, lease: HeldLease, events: Events) -> None:
    config, task = _config_and_task(run)
    _load_models(task, run, config, lease.tell)
    versions = Versions(run)
    reference = await_reference(versions, lease, deadline=config.limits.data_deadline)
    adapter = find_adapter(run, config, lease.tell)
    with closing(open_generator(config, events, search_sampling(config), adapter)) as generator:
        searcher = Searcher(
            index,
            seed=config.seed,
            config=config.search,
            stream=_stream(config, read_prompts(run, "train"), index),
            task=task,
            generator=generator,
            scorer=_scorer(config, adapter, versions.load(reference), reference),
            log=Trajectories(run),
            versions=versions,
            lease=lease,
            events=events,
            deadline=config.limits.data_deadline,
            lag=config.sync.lag,
            first_version=config.start.sync,
            updates_in_flight=config.engine.in_flight == "update",
        )
        searcher.run()


def run_trainer(run: Run, lease: HeldLease, events: Events) -> None:
    config, task = _config_and_task(run)
    with suppress(Stopped):  # which is for the next sync
        lease.check()  # a life that was superseded while it imported must not supersede the attempt of the one that did
    refuse_damage(run, whole=False)
    attempt, checkpoint = starting_checkpoint.claim(run, config, lease, events)
    Thread(target=_tell_of_ledger, args=(run, attempt, events), daemon=True).start()
    with scratch_folder() as scratch:
        if checkpoint is not None:
            adapter = find_adapter(run, config, lease.tell)
            policy = load_policy(config, adapter, checkpoint, device=_first_device(config))
        else:
            policy = load_start(run, config, lease.tell, device=_first_device(config))
            if not run.parent:
                _store_prompts(run, config, task, policy.tokenizer, events)
        with (
            leading(run, config, policy, checkpoint, scratch=scratch, tell=lease.tell) as (learner, state),
            closing(open_metric_log(run, config.metrics)) as metrics,
            Reader(run, attempt.number, lease.life, deadline=max(config.limits.data_deadline, STARTING)) as buffer,
        ):
            trainer = Trainer(
                config,
                attempt=attempt.number,
                learner=learner,
                buffer=buffer,
                ledger=ParquetLedger(run, attempt.number),
                versions=Versions(run),
                checkpoints=Checkpoints(run),
                metrics=metrics,
                lease=lease,
                events=events,
                scratch=scratch,
            )
            if why := trainer.learner.padded_because:
                told = f"responses are padded, and read with their prompts one by one: {why} (docs/models.md)"
                events.write("trainer-pads", told, why=why)
            if state is not None:
                trainer.resume(state)
                events.write("resumed", f"attempt {attempt.number} goes on after step {state.step}")
            trainer.run()


def run_evaluator(run: Run, lease: HeldLease, events: Events) -> None:
    config, task = _config_and_task(run)
    _load_models(task, run, config, lease.tell)
    versions = Versions(run)
    reference = await_reference(versions, lease, deadline=config.limits.data_deadline)
    adapter = find_adapter(run, config, lease.tell)
    needs_reference = isinstance(task, Measures) and task.needs_reference
    sampling = evaluation_sampling(config, reads_logps=needs_reference)
    scorer = partial(_scorer, config, adapter)
    with closing(open_generator(config, events, sampling, adapter)) as generator:
        evaluator = Evaluator(
            config,
            prompts=read_prompts(run, "test")[: config.evaluation.prompts],
            task=task,
            generator=generator,
            reference=scorer(versions.load(reference), reference) if needs_reference else None,
            trainers_scorer=None if isinstance(generator, TransformersGenerator) else scorer,
            versions=versions,
            evaluations=Evaluations(run),
            lease=lease,
            events=events,
        )
        evaluator.run()


def _tell_of_ledger(run: Run, attempt: Attempt, events: Events) -> None:
    """Say what is damaged of the ledger before an attempt. No step depends on it, so none waits for this."""
    newest = attempt.continues.number if attempt.continues else 0
    try:
        spans = [span for span in chain(run, attempt.number) if span.attempt != attempt.number]
        names = [Version(sync, span.attempt) for sync in range(1, newest + 1) for span in spans if span.covers(sync)]
        for fault in find_faults(run, names):
            events.write("ledger-damaged", fault, severity="error")
    except StorageError as error:
        log.warning("the ledger was not verified: %s", error)


def load_checkpoint(run: Run, config: Config, name: Version) -> tuple[Policy, TrainingState]:
    folder = starting_checkpoint.intact_folder(run, config, name)
    return load_policy(config, find_adapter(run, config), folder), TrainingState.load(folder)


def _first_device(config: Config) -> str:
    """Where a trainer's policy is loaded: no GPU need have room for what several ranks hold."""
    return config.model.device if config.training.ranks == 1 else "cpu"


def _config_and_task(run: Run) -> tuple[Config, Task]:
    config = parse(run.config)
    return config, get_task(config.task)


def _load_models(task: Task, run: Run, config: Config, tell: Tell) -> None:
    if isinstance(task, UsesModels):
        tell("loading the models that the task scores with")
        with asking(task, "load"):
            task.load(lambda setting, place: _model_at(setting, place, run, config, tell))


def _scorer(config: Config, adapter: Adapter | None, folder: Path, version: Version) -> PolicyScorer:
    policy = load_policy(config, adapter, folder)
    return PolicyScorer(policy, version, compute_dtype=config.training.compute_dtype)


def open_scorer(run: Run, config: Config, task: Task) -> PolicyScorer:
    """What scores responses from elsewhere as searchers score theirs: the reference, and the task with its models. The
    run has a reference."""

    def tell(status: str, **progress: float) -> None:
        log.info(status)

    _load_models(task, run, config, tell)
    versions = Versions(run)
    reference = versions.reference()
    assert reference is not None
    return _scorer(config, find_adapter(run, config, tell), versions.load(reference), reference)


def load_policy(config: Config, adapter: Adapter | None, path: str | Path | None, *, device: str = "") -> Policy:
    """A model, or the base with the adapter that lies there; without a path with a fresh one."""
    model = config.model
    options: dict[str, Any] = {
        "dtype": model.dtype, "device": device or model.device, "trust_remote_code": model.trust_remote_code
    }  # fmt: skip
    if adapter:
        return Policy.load_adapted(adapter, Path(path) if path else None, seed=config.seed, **options)
    assert path is not None
    return Policy.load(path, revision=model.revision, **options)


def load_merged(run: Run, config: Config, version: Version) -> Snapshot:
    """A version that is an adapter, as a plain model in main memory, of which there is no other copy."""
    config = config.replace({"model.device": "cpu"})
    policy = load_policy(config, find_adapter(run, config), Versions(run).load(version))
    merge(policy.model)
    return Snapshot(policy.model, policy.tokenizer)


def find_adapter(run: Run, config: Config, tell: Tell = lambda status, **progress: None) -> Adapter | None:
    """What the run's adapters are, with their base on this machine; None where the weights themselves are trained."""
    model = config.model
    if not model.lora_rank:
        return None
    base = local_folder("model.path", _base_of(run, config, tell), revision=model.revision)
    tell("reading the base of the adapters")
    return Adapter(
        rank=model.lora_rank,
        alpha=model.peft_alpha,
        targets=model.lora_targets,
        base=base,
        base_name=model.path,
        revision=None if model.revision == "main" else model.revision,
        base_sha256=files_sha256(base),
    )


def load_start(run: Run, config: Config, tell: Tell = lambda status, **progress: None, *, device: str = "") -> Policy:
    """The policy before training. What cannot be loaded here is a bad setting, unless it may load when tried again."""
    try:
        adapter = find_adapter(run, config, tell)
        start = _start_of(run, config, tell, adapted=adapter is not None)
        policy = load_policy(config, adapter, start, device=device)
    except Damaged as error:
        raise ConfigError(f"model.path: {error}") from error
    check_first_policy(policy, longest=config.longest)
    _check_start(run, policy)
    return policy


def _check_start(run: Run, policy: Policy) -> None:
    """That a run which has begun begins with the same policy when it, or a fork of it, begins anew."""
    versions = Versions(run)
    reference = versions.reference()
    began_with = versions.weights_sha256(reference) if reference else None
    if began_with and policy.snapshot().sha256 != began_with:
        raise ConfigError(
            f"model.path: what lies there is another policy than the one that version {reference} of {run.name!r} was "
            f"made from: its weights have sha256 {policy.snapshot().sha256[:12]}…, not {began_with[:12]}…"
        )


def _start_of(run: Run, config: Config, tell: Tell, *, adapted: bool) -> str | Path | None:
    """Where the policy before training lies, where that is stored already; else its base, or None for a fresh
    adapter."""
    versions = Versions(run)
    if (reference := versions.reference()) and config.model.publish_dtype == config.model.dtype:
        return versions.load(reference)
    return None if adapted else _base_of(run, config, tell)


def _base_of(run: Run, config: Config, tell: Tell) -> str | Path:
    """Where what the run begins with lies: as configured, or made by the task and cached by its recipe."""
    path = config.model.path
    if path:
        return _model_at("model.path", path, run, config, tell)
    task = policy_maker(get_task(config.task))
    recipe = f"{task.recipe()}:{config.seed}"

    def make(folder: Path) -> None:
        task.base_policy(folder, seed=config.seed, report=lambda what, share: tell(what, share=share))

    name = sha256(recipe.encode()).hexdigest()[:16]
    patience = config.limits.data_deadline
    return shared_copy("base-policies", name, whole=Path.is_dir, make=make, keep=_BASES, deadline=patience)


def _model_at(setting: str, place: str, run: Run, config: Config, tell: Tell) -> str | Path:
    """What lies at a URL as a folder here; folders and names of the hub as they are."""
    if "://" in place:
        return _fetch_model(setting, place, run, config, tell)
    check_place(setting, place)
    return place


def _fetch_model(setting: str, url: str, run: Run, config: Config, tell: Tell) -> Path:
    """A copy of the Hugging Face folder at a URL, made once per run: names and sizes alone do not say whether what lies
    there is still the same."""
    store = open_store(url.rstrip("/"), deadline=config.limits.store_deadline)
    sizes = {it.key: it.size for it in store.list() if "/" not in it.key and it.key.endswith(MODEL_FILES)}
    if missing := _missing_files(store, sizes):
        raise ConfigError(f"{setting}: {url} is not a Hugging Face folder with safetensors: no {missing} there")

    def is_whole(copy: Path) -> bool:
        return all((copy / name).is_file() and (copy / name).stat().st_size == sizes[name] for name in sizes)

    def fetch(copy: Path) -> None:
        for n, name in enumerate(sizes):
            tell(f"fetching {url}/{name}", share=n / len(sizes))
            store.download(name, copy / name)
        if not is_whole(copy):
            raise StorageError(f"{url} changed while it was fetched")

    name = sha256(f"{run.url} {url} {sizes}".encode()).hexdigest()
    return shared_copy("models", name, whole=is_whole, make=fetch, keep=4, deadline=config.limits.data_deadline)


def _missing_files(store: Store, found: Collection[str]) -> str:
    """What a folder lacks to be loaded; empty if nothing."""
    if "config.json" not in found:
        return "config.json"
    index = "model.safetensors.index.json"
    if index not in found:
        return "" if any(name.endswith(".safetensors") for name in found) else "*.safetensors"
    try:
        parts = weight_names(store.read(index))
    except ValueError:
        return f"readable {index}"
    return ", ".join(sorted(parts - set(found)))


def _store_prompts(run: Run, config: Config, task: Task, tokenizer: Any, events: Events) -> None:
    train = _make_prompts(task, "train", config.task.train, config, tokenizer, events)
    test = _make_prompts(task, "test", config.task.test, config, tokenizer, events)
    known = {prompt.prompt_id for prompt in train}
    if twice := next((it.prompt_id for it in test if it.prompt_id in known), None):
        raise DataError(f"task {task.name!r}: prompt_id {twice!r} is in both splits, train and test: it must name one")
    if config.search.prompts_from:
        train = _chosen(run, config, train, events)
    check_fill(config, train)
    write_prompts(run, "train", train)
    write_prompts(run, "test", test)


def check_fill(config: Config, prompts: Sequence[Prompt]) -> None:
    """That searchers may generate what the first step waits for: a round asks no prompt twice, so where prompts are few
    it asks fewer."""
    search = config.search
    if search.rounds_per_version is None:
        return
    streams = [_stream(config, prompts, searcher) for searcher in range(search.searchers)]
    rounds = [it.take(n, search.prompts_per_round) for it in streams for n in range(search.rounds_per_version)]
    if (most := sum(map(len, rounds)) * search.responses_per_prompt) < search.initial_fill:
        raise ConfigError(
            f"search.rounds_per_version: with {len(prompts)} prompts {search.rounds_per_version} round(s) of each "
            f"searcher have {most} responses, and the first step waits for {search.initial_fill} (search.initial_fill)"
        )


def _stream(config: Config, prompts: Sequence[Prompt], searcher: int) -> PromptStream:
    search = config.search
    together = max(1, search.searchers)  # of those that joined a run that began with none, each by itself
    return PromptStream(prompts, seed=config.seed, searcher=searcher, searchers=together, shuffle=search.shuffle)


def _make_prompts(
    task: Task, split: str, given: str, config: Config, tokenizer: Any, events: Events
) -> Sequence[Prompt]:
    """Of a split, from the rows at `given` or at the task's own source."""
    with asking(task, "source"):
        source = given or task.source(split)
    rows = read_rows(source, fields=task.fields if isinstance(task, ReadsFields) else None) if source else []
    limit = config.search.max_prompt_tokens
    prompts = _prompts_of(task, split, rows, tokenizer, limit)
    if (left_out := len(rows) - len(prompts)) > 0:  # a task may make several of a row
        what = (
            f"{left_out} of {len(rows)} rows of split {split!r} made no prompt: they have more than {limit} tokens "
            "(search.max_prompt_tokens), or the task has a reason of its own"
        )
        events.write("prompts-left-out", what, severity="warning", split=split, left_out=left_out)
    return prompts


def _prompts_of(task: Task, split: str, rows: Sequence[Mapping[str, Any]], tokenizer: Any, limit: int) -> list[Prompt]:
    """Those that the task makes, which may be anybody's: what no policy can read is refused here, not in a searcher."""
    with asking(task, "prompts"):
        prompts = list(task.prompts(split, rows, tokenizer, max_tokens=limit))
    if not prompts:
        lacks = not rows and isinstance(task, ReadsFields)
        unread = f"; it was given no rows, which task.{split} says where to find" if lacks else ""
        raise DataError(
            f"task {task.name!r} makes no prompt of split {split!r} with at most {limit} tokens "
            f"(search.max_prompt_tokens){unread}"
        )
    for prompt in prompts:
        if fault := _fault_of(prompt, limit):
            raise DataError(f"task {task.name!r}: {fault}")
    return prompts


def _fault_of(prompt: Any, limit: int) -> str:
    """Why a prompt cannot be asked or stored; empty if it can."""
    if not isinstance(prompt, Prompt):
        return f"a prompt must be a tba.types.Prompt, got {prompt!r:.80}"
    named = f"prompt {prompt.prompt_id!r}"
    for field in ("prompt_id", "text", "answer"):
        if not isinstance(value := getattr(prompt, field), str):
            return f"{named}: {field} must be text, got {value!r:.80}"
    if not 1 <= len(prompt.tokens) <= limit:
        return f"{named} must have 1 to {limit} tokens (search.max_prompt_tokens), got {len(prompt.tokens)}"
    if strange := [token for token in prompt.tokens if not isinstance(token, Integral)]:
        return f"{named}: tokens must be whole numbers, got {strange[0]!r:.80}"
    try:
        json.dumps(dict(prompt.metadata), allow_nan=False)
    except (TypeError, ValueError) as error:
        return f"{named}: metadata must be JSON: {error}"
    return ""


def _chosen(run: Run, config: Config, prompts: Sequence[Prompt], events: Events) -> list[Prompt]:
    """The prompts of which the earlier run tells what the settings want. It is asked once: whoever begins the run anew
    keeps to what is stored, whatever has become of the earlier one."""
    search = config.search
    if has_prompts(run, "train"):
        stored = {prompt.prompt_id for prompt in read_prompts(run, "train")}
        return [prompt for prompt in prompts if prompt.prompt_id in stored]
    known = ask(search.prompts_from, search.prompts_where, needed=search.prompts_per_round)
    chosen, told = known.choose(prompts), known.tell(prompts)
    if len(chosen) < search.prompts_per_round:
        raise ConfigError(f"{told}; a round asks {search.prompts_per_round} (search.prompts_per_round)")
    unknown = known.unknown(prompts)
    events.write("prompts-chosen", told, chosen=len(chosen), of=len(prompts), unknown=unknown)
    return chosen
