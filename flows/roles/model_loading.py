"""Load the models of a run: the policy it starts from, its checkpoints, and its published versions."""

from collections.abc import Collection
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from flows.roles import starting_checkpoint
from storage.local_files.regular_files import sha256_of_file
from storage.local_files.shared_cache import shared_copy
from storage.objects.open_store import open_store
from storage.objects.store import Store
from storage.runs.run import Run
from storage.weights.versions import Versions
from tba.config import Config
from tba.errors import ConfigError, Damaged, StorageError
from tba.models.adapters import Adapter, adapter_like, files_sha256, merge
from tba.models.file_checks import weight_names
from tba.models.gguf_files import find_gguf, is_gguf
from tba.models.location import check_place
from tba.models.policy import Policy, Snapshot
from tba.models.pretrained import local_folder
from tba.models.saving.weight_digests import is_known
from tba.models.trainable import check_first_policy
from tba.runtime.installed_packages import find_in_package, is_in_package
from tba.tasks.registry import get_task, policy_maker
from tba.train.training_state import TrainingState
from tba.types import Version

MODEL_FILES = (".json", ".safetensors", ".txt", ".model", ".jinja", ".py")
"""Endings of the files that are fetched of a model's folder: weights only as safetensors, and everything else that
models and tokenizers consist of."""
_BASES = 1000  # how many policies made by tasks stay in the cache: an adapter is useless without its base


class Tell(Protocol):
    """Called with what is being done, and with `share`, the part of it that is done."""

    def __call__(self, status: str, **progress: float) -> None: ...


def load_checkpoint(run: Run, config: Config, name: Version) -> tuple[Policy, TrainingState]:
    folder = starting_checkpoint.intact_folder(run, config, name)
    return load_policy(config, find_adapter(run, config), folder), TrainingState.load(folder)


def first_device(config: Config) -> str:
    """Return the device on which a trainer first loads its policy. For several ranks this is the CPU, since one GPU may
    not have room for the whole policy."""
    return config.model.device if config.training.ranks == 1 else "cpu"


def load_policy(config: Config, adapter: Adapter | None, path: str | Path | None, *, device: str = "") -> Policy:
    """Return the policy in the folder `path`. With `adapter`, the folder holds adapter weights, which are loaded on top
    of the base; without a path the adapter weights are new."""
    model = config.model
    options: dict[str, Any] = {
        "dtype": model.dtype, "device": device or model.device, "trust_remote_code": model.trust_remote_code
    }  # fmt: skip
    if adapter:
        return Policy.load_adapted(adapter, Path(path) if path else None, seed=config.seed, **options)
    assert path is not None
    return Policy.load(path, revision=model.revision, **options)


def load_merged(run: Run, config: Config, version: Version) -> Snapshot:
    """Load a version that is stored as an adapter, and merge it into its base in main memory. Return the merged model
    and its tokenizer. No other code uses this copy of the model."""
    config = config.replace({"model.device": "cpu"})
    policy = load_policy(config, find_adapter(run, config), Versions(run).load(version))
    merge(policy.model)
    return Snapshot(policy.model, policy.tokenizer)


def find_adapter(run: Run, config: Config, tell: Tell = lambda status, **progress: None) -> Adapter | None:
    """Return the description of the run's adapters, with their base fetched to this machine. Return None if the run
    trains all weights."""
    model = config.model
    if not model.lora_rank:
        return None
    base = local_folder("model.path", locate_base(run, config, tell), revision=model.revision)
    tell("reading the base model of the adapters")
    return adapter_like(model, base, base_sha256=files_sha256(base))


def load_start(run: Run, config: Config, tell: Tell = lambda status, **progress: None, *, device: str = "") -> Policy:
    """Return the policy before training. Raise ConfigError if it cannot be loaded and trying again would not help."""
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
    """Raise ConfigError if the run has already published its starting policy and this policy differs from it. A run, or
    a fork of it, must start from the same policy every time."""
    versions = Versions(run)
    reference = versions.reference()
    began_with = versions.weights_sha256(reference) if reference else None
    if not began_with or not is_known(began_with):
        return
    if (now := policy.snapshot().digest_like(began_with)) != began_with:
        raise ConfigError(
            f"model.path: the model there has changed since version {reference} of {run.name!r} was made from it: its "
            f"weights have sha256 {now[:12]}…, not {began_with[:12]}…"
        )


def _start_of(run: Run, config: Config, tell: Tell, *, adapted: bool) -> str | Path | None:
    """Return the place from which the policy before training is loaded: the run's reference version if it is stored in
    the training dtype, else the base model. Return None if a new adapter is to be made."""
    versions = Versions(run)
    if (reference := versions.reference()) and config.model.publish_dtype == config.model.dtype:
        return versions.load(reference)
    return None if adapted else locate_base(run, config, tell)


def locate_base(run: Run, config: Config, tell: Tell) -> str | Path:
    """Return the place of the base model: `model.path`, or else the cached policy that the task makes. Its key in the
    cache is the digest of the task's recipe and the seed."""
    path = config.model.path
    if path:
        return model_at("model.path", path, run, config, tell)
    task = policy_maker(get_task(config.task))
    recipe = f"{task.recipe()}:{config.seed}"

    def make(folder: Path) -> None:
        task.base_policy(folder, seed=config.seed, report=lambda what, share: tell(what, share=share))

    name = sha256(recipe.encode()).hexdigest()[:16]
    patience = config.limits.data_deadline
    return shared_copy("base-policies", name, whole=Path.is_dir, make=make, keep=_BASES, deadline=patience)


def model_at(setting: str, place: str, run: Run, config: Config, tell: Tell) -> str | Path:
    """Return a local copy of a model at a URL, the folder that a GGUF file is converted to, or the folder that a place
    inside an installed package names. Return any other place, a folder or a name on the Hugging Face hub, as it is."""
    if "://" in place:
        return _fetch_model(setting, place, run, config, tell)
    return model_here(setting, place, config, tell)


def model_here(setting: str, place: str, config: Config, tell: Tell) -> str | Path:
    """Like `model_at`, for places that are not URLs."""
    check_place(setting, place)
    if is_gguf(place):
        return convert_gguf(setting, place, config, tell)
    return find_in_package(setting, place) if is_in_package(place) else place


def convert_gguf(setting: str, place: str, config: Config, tell: Tell) -> Path:
    """Return the folder with the model of a GGUF file. All runs on this machine share it: its name has the sha256 of
    the file."""
    from tba.models import gguf_conversion

    file = find_gguf(setting, place)
    name = sha256(f"{sha256_of_file(file)} {gguf_conversion.RECIPE}".encode()).hexdigest()[:16]

    def make(folder: Path) -> None:
        tell(f"converting {file.name} to a Hugging Face folder")
        gguf_conversion.convert(setting, file, folder)

    patience = config.limits.data_deadline
    return shared_copy("gguf-models", name, whole=Path.is_dir, make=make, keep=4, deadline=patience)


def _fetch_model(setting: str, url: str, run: Run, config: Config, tell: Tell) -> Path:
    """Return a local copy of the Hugging Face folder at a URL. Each run makes a copy of its own, because names and
    sizes of files do not show whether their content is still the same."""
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


def _missing_files(store: Store, names: Collection[str]) -> str:
    """Return which files a folder lacks to be loaded, or an empty string if none are missing."""
    if "config.json" not in names:
        return "config.json"
    index = "model.safetensors.index.json"
    if index not in names:
        return "" if any(name.endswith(".safetensors") for name in names) else "*.safetensors"
    try:
        parts = weight_names(store.read(index))
    except ValueError:
        return f"readable {index}"
    return ", ".join(sorted(parts - set(names)))
