"""All settings of a run. They are frozen, checked before anything starts, and stored in the run's `run.json`.

Numbers that follow from settings are properties. `replace({"training.steps": 10})` makes a copy with changed settings.
An error names the setting, its value and what the setting allows. Symbols in comments are those of the paper: B prompts
per step, K responses per prompt in a step, S responses per prompt and visit, k steps per sync, m the share of the
newest data.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from difflib import get_close_matches
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from tba.config.engine import AnyEngine, VLLMEngine
from tba.config.kinds import KINDS, kind_of, names_of, switched, without_old_defaults
from tba.config.model import ModelConfig, TaskConfig
from tba.config.operations import AlarmsConfig, LimitsConfig, MetricsConfig, StartConfig
from tba.config.rules import rules
from tba.config.search import SamplingConfig, SearchConfig
from tba.config.training import EvaluationConfig, SyncConfig, TrainingConfig
from tba.config.upgrade import renamed, upgraded
from tba.errors import ConfigError
from tba.objectives import AnyObjective, TrajectoryBalance
from tba.settings import T, settings


@settings
class Config:
    """All settings of a run."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    """Seed of all random choices."""
    task: TaskConfig = Field(default_factory=TaskConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    objective: AnyObjective = Field(default_factory=TrajectoryBalance)
    sampling: SamplingConfig = Field(default_factory=SamplingConfig)
    search: SearchConfig = Field(default_factory=SearchConfig)
    engine: AnyEngine = Field(default_factory=VLLMEngine)
    training: TrainingConfig = Field(default_factory=TrainingConfig)
    sync: SyncConfig = Field(default_factory=SyncConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    limits: LimitsConfig = Field(default_factory=LimitsConfig)
    alarms: AlarmsConfig = Field(default_factory=AlarmsConfig)
    metrics: MetricsConfig = Field(default_factory=MetricsConfig)
    start: StartConfig = Field(default_factory=StartConfig)

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        for holds, message in rules(self):
            if not holds:
                raise ValueError(message)
        return self

    @property
    def batch(self) -> int:
        """Number of trajectories in one gradient step: B x K."""
        return self.training.prompts_per_step * self.training.responses_per_prompt

    @property
    def responses_per_round(self) -> int:
        return self.search.prompts_per_round * self.search.responses_per_prompt

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a prompt and its response together."""
        return self.search.max_prompt_tokens + self.search.max_response_tokens

    @property
    def most_at_first(self) -> int:
        """Maximum number of trajectories before the first step, if `search.rounds_per_version` is set; otherwise 0."""
        return (self.search.rounds_per_version or 0) * self.search.searchers * self.responses_per_round

    @property
    def prompts_in_step(self) -> int:
        """Number of prompts that all searchers together visit in one round."""
        return self.search.searchers * self.search.prompts_per_round

    @property
    def evaluation_temperature(self) -> float:
        """Temperature of the responses that are sampled to score a version."""
        own = self.evaluation.temperature
        return self.search.temperature if own is None else own

    @property
    def evaluation_top_p(self) -> float:
        own = self.evaluation.top_p
        return self.search.top_p if own is None else own

    @property
    def awaits_searchers(self) -> bool:
        """True if a sync may wait for responses that searchers generate with the previous version. Every version must
        then be published."""
        return self.sync.lag is not None or self.sampling.max_age is not None

    @property
    def stores_reference_logps(self) -> bool:
        """True if the log-probability of each response token under the reference is computed and stored."""
        return self.search.reference_logps == "always" or self.objective.needs_reference

    @property
    def last_sync(self) -> int:
        return self.sync_of_step(self.training.steps)

    def sync_of_step(self, step: int) -> int:
        """Return the number of the sync that closes a step: the first sync after this step."""
        return self.start.sync + math.ceil((step - self.start.step) / self.sync.every)

    def sync_before(self, step: int) -> int:
        """Return the number of the newest sync before a step. The step draws from the sync records up to this
        number."""
        return self.start.sync + (step - 1 - self.start.step) // self.sync.every

    def step_of_sync(self, sync: int) -> int:
        """Return the step that a sync follows. The last sync follows the last step, even if fewer than `sync.every`
        steps are left for it."""
        if sync < self.start.sync:
            raise ValueError(f"sync {sync} is before the start of this run, sync {self.start.sync}")
        return min(self.start.step + (sync - self.start.sync) * self.sync.every, self.training.steps)

    @property
    def recent_ages(self) -> tuple[int, int, float]:
        """Lowest, highest and mean age of recent draws, in gradient steps, if every round is admitted at the sync that
        it is meant for. Responses of a late round are older. After the first syncs, ages are k to 2k - 1 without
        `sync.lag`, and lag x k to lag x k + k - 1 with it. If the run ends before these ages are reached, the numbers
        are those of all draws of the run."""
        k, steps = self.sync.every, self.training.steps - self.start.step
        low = k if self.sync.lag is None else self.sync.lag * k
        low, high = (low, min(low + k, steps) - 1) if steps > low else (0, steps - 1)
        return low, high, (low + high) / 2

    @property
    def bytes_per_trajectory(self) -> int:
        """Estimated bytes of a trajectory of full length on disk. A response token was measured to take about 8 bytes,
        and a prompt token about 3."""
        return 200 + 3 * self.search.max_prompt_tokens + 8 * self.search.max_response_tokens

    def replace(self, changes: Mapping[str, Any] | None = None, /, **sections: Any) -> "Config":
        """Return a copy with changes by dotted key, `replace({"training.steps": 10})`; `replace(seed=1)` also works.

        If `objective.name` or `engine.name` changes, each setting of its section that equals the old choice's default
        gets the new choice's default.
        """
        plain, changes = asdict(self), {**(changes or {}), **sections}
        if unnamed := [key for key in changes if not isinstance(key, str)]:
            raise ConfigError(f"the name of a setting must be text, got {unnamed[0]!r}")
        changes = renamed(changes)
        for section in KINDS:
            name = _name_among(changes, section)
            if name not in ("", plain[section]["name"]):
                plain[section] = switched(getattr(self, section), name, section)
        for key, value in changes.items():
            _set(plain, _with_all_kinds(plain), key, value)
        for section in KINDS:
            plain[section] = without_old_defaults(getattr(self, section), plain[section], section)
        return parse(plain)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def _name_in(section: Any) -> Any:
    return section.get("name") if isinstance(section, Mapping) else None


def _name_among(changes: Mapping[str, Any], section: str) -> str:
    """Return the name that the last of some changes chooses for a section; empty if no change does."""
    names = {section: _name_in, f"{section}.name": lambda value: value}
    chosen = [names[key](value) for key, value in changes.items() if key in names]
    return next((name for name in reversed(chosen) if isinstance(name, str)), "")


def _with_all_kinds(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, with every setting of any objective and any engine added to these two sections."""
    return {**plain, **{section: dict.fromkeys(sorted(names_of(section))) | plain[section] for section in KINDS}}


def _set(plain: dict[str, Any], known: Mapping[str, Any], key: str, value: Any) -> None:
    """Set one setting by its dotted key. If no setting has this key, raise ConfigError with similar keys."""
    *path, leaf = key.split(".")
    place, names = plain, known
    for name in path:
        if not isinstance(place.get(name), dict):
            raise ConfigError(f"unknown setting {key!r}: there is no section {name!r}{_meant(key, known)}")
        place, names = place[name], names[name]
    if leaf not in names and path[-1:] != ["options"]:
        raise ConfigError(
            f"unknown setting {key!r}"
            + (_meant(key, known) or _near(key, names) or f"; known here: {', '.join(sorted(names))}")
        )
    if isinstance(place.get(leaf), dict):
        if not isinstance(value, Mapping):
            example = next(iter(place[leaf]), "NAME")
            raise ConfigError(f"{key} is a section: name a setting in it, such as {key}.{example}, got {value!r}")
        value = {**place[leaf], **value}
    place[leaf] = value


def _meant(key: str, known: Mapping[str, Any]) -> str:
    """Suggest the settings, in any section, that have the name at the end of a key. Return "" if there are none."""
    name = key.rpartition(".")[2]
    keys = [
        f"{section}.{name}"
        for section, place in known.items()
        if isinstance(place, dict) and name in place and section != "start"
    ]
    return f"; did you mean {' or '.join(keys)}?" if keys else ""


def _near(key: str, place: Mapping[str, Any]) -> str:
    """Suggest the settings of a section whose names are similar to the last part of a key. Return "" if there are
    none."""
    section, dot, name = key.rpartition(".")
    similar = get_close_matches(name, place, cutoff=0.8)
    return f"; did you mean {' or '.join(f'{section}{dot}{other}' for other in similar)}?" if similar else ""


_adapter = TypeAdapter(Config)
_adapter_of_json = TypeAdapter(Any)


def parse(plain: Mapping[str, Any] | str) -> Config:
    """Make a config from nested dicts or JSON, which may come from an older run. Raise ConfigError with one line for
    each setting at fault."""
    try:
        plain = _adapter_of_json.validate_json(plain) if isinstance(plain, str) else plain
        return _adapter.validate_python(upgraded(plain) if isinstance(plain, Mapping) else plain)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from None


def parse_options(kind: type[T], task: TaskConfig) -> T:
    """Make an object of a task's own class of settings from `task.options`."""
    if getattr(kind, "__pydantic_config__", {}).get("extra") != "forbid":
        raise TypeError(
            f"class {kind.__qualname__} must be decorated with @tba.config.settings, which refuses unknown options"
        )
    try:
        return TypeAdapter(kind).validate_python(task.options)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e, "task", "options") for e in error.errors())) from None


def parse_known(plain: Mapping[str, Any]) -> Config:
    """Make a config for reading a run, not for continuing it. Settings that only a later version of this program knows
    are left out. Continuing a run without them would be another experiment, so `parse` refuses them."""
    plain, known = upgraded(plain), Config().to_dict()
    for section in KINDS:
        if kind := kind_of(section, _name_in(plain.get(section))):
            known[section] = {field.name: None for field in fields(kind)}
    return parse(_known(plain, known))


def _known(plain: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings whose names are known. A section without known names, such as `task.options`, may have any
    names."""

    def inside(name: str, value: Any) -> Any:
        names = known[name]
        return _known(value, names) if names and isinstance(names, dict) and isinstance(value, Mapping) else value

    return {name: inside(name, value) for name, value in plain.items() if name in known}


def _explain(error: Any, *section: str) -> str:
    """Return one line that names the setting at fault, the values that it may have, and the value that it has."""
    place, chosen = [*section, *map(str, error["loc"])], ""
    if place[0:1] and place[0] in KINDS:
        if error["type"] == "union_tag_invalid" and isinstance(error["input"], Mapping):
            known = ", ".join(repr(name) for name in KINDS[place[0]] if name != "custom")
            other = " or the path of a class" if "custom" in KINDS[place[0]] else ""
            return f"{place[0]}.name must be one of {known}{other}, got {error['input']['name']!r}"
        if len(place) == 1 and not isinstance(error["input"], Mapping):
            return f"{place[0]} must be a section of settings, got {error['input']!r}"
        chosen = place.pop(1) if len(place) > 1 else ""
    field = ".".join(place) or "the settings"
    if error["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        if chosen and place[1] in names_of(place[0]):
            choice = "a class of your own" if chosen == "custom" else repr(chosen)
            return f"{field} does not apply to {choice}, got {error['input']!r}"
        return f"unknown setting {field!r}"
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    if error["type"] in ("tuple_type", "list_type"):
        return f"{field} must be a list, such as [1,4], got {error['input']!r}"
    # an end such as ", got a number with a fractional part" would only repeat the value
    fault = re.sub(r"( after validation)?, (got|not|unable to) .*", "", error["msg"])
    allowed = re.sub(r"^\w+ should ", "", fault)
    wanted = f" must {allowed}" if allowed != fault else f": {fault[0].lower()}{fault[1:]}"
    return f"{field}{wanted}, got {error['input']!r}"
