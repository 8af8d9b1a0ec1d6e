"""Read the settings of older runs.

In older runs, one class held the settings of all objectives. Such a run stored all of them, including those of other
objectives, and stored `own` for a choice that was left to the objective. The same was true of the engines. Runs that do
not know `training.computed_rows` computed in float32 on every CPU if `training.compute_dtype` was `auto`. Runs that do
not know `sync.weights_digest` hashed all weights at once. Before `engine.profile` there was `engine.compile`: true
meant `default`, and the profile nearest to false is `safe`.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, TypeGuard

from tba.config.kinds import DEFAULTS, kind_of, means

_PROFILES = {True: "default", False: "safe"}
"""The value of `engine.profile` for each value of `engine.compile`."""

_ONCE_COMMON: Mapping[str, Mapping[str, Any]] = {
    "objective": {
        "target_temperature_start": 1.0, "target_temperature_steps": 1, "reference_temperature_end": 1.0,
        "reference_temperature_steps": 1, "log_z": "group", "log_z_learning_rate": 1e-3, "correction": "own",
        "correction_level": "own", "clip_low": 0.2, "clip_high": 0.2, "ratio_cap": 8.0, "prox_share": 0.5,
        "normaliser": "own", "penalty": "own", "centre": "policy", "anchor": "own", "value_beta": 0.0, "discount": 1.0,
        "gae_decay": 0.95, "value_share": 0.1, "value_learning_rate": 0.0,
    },
    "engine": {"memory_fraction": None, "cache_gigabytes": None, "tensor_parallel": 1, "profile": "default"},
}  # fmt: skip
"""The settings that every objective and every engine once had, with the defaults they had then."""

_SYNC_ONCE = {"every", "lag", "checkpoint_every", "keep_versions", "keep_checkpoints"}
"""Settings of `sync` that every stored run has. Whoever starts a run does not give all of them."""


def upgraded(plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings without those that the chosen objective and engine do not have. Such a setting stays if its
    value is not the former default, so that `parse` refuses it by name. A section without `name` gets the default
    name."""
    result = dict(plain)
    if isinstance(engine := result.get("engine"), Mapping):
        result["engine"] = _with_profile(engine)
    for section in _ONCE_COMMON:
        if isinstance(values := result.get(section), Mapping):
            result[section] = _upgraded(section, {"name": DEFAULTS[section], **values})
    training = result.get("training")
    if _is_of_older_run(training) and training["compute_dtype"] == "auto":
        result["training"] = {**training, "compute_dtype": "bfloat16-on-gpu"}
    sync = result.get("sync")
    if isinstance(sync, Mapping) and sync.keys() >= _SYNC_ONCE and "weights_digest" not in sync:
        result["sync"] = {**sync, "weights_digest": "whole"}
    return result


def renamed(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes of settings by dotted key, with `engine.profile` in place of `engine.compile`."""
    result: dict[str, Any] = {}
    for key, value in changes.items():
        profile = _profile_of(value) if key == "engine.compile" else None
        result |= {"engine.profile": profile} if profile else {key: value}
    return result


def _with_profile(engine: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of an engine with `profile` in place of `compile`. If both are there and contradict each
    other, return them unchanged, so that `parse` refuses `compile` as unknown."""
    profile = _profile_of(engine.get("compile"))
    if profile is None or engine.get("profile", "default") not in ("default", profile):
        return engine
    return {**{name: value for name, value in engine.items() if name != "compile"}, "profile": profile}


def _profile_of(compiles: Any) -> str | None:
    """Return the profile that a value of `engine.compile` meant, or None if it is no such value."""
    return next((profile for value, profile in _PROFILES.items() if means(compiles, value)), None)


def _is_of_older_run(training: Any) -> TypeGuard[Mapping[str, Any]]:
    """True if these settings are those of a stored run, which are complete but for settings that are newer."""
    known = training.keys() if isinstance(training, Mapping) else ()
    return "steps" in known and "compute_dtype" in known and "computed_rows" not in known


def _upgraded(section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    kind = kind_of(section, values["name"])
    if kind is None:
        return dict(values)
    own, once = {field.name for field in fields(kind)}, _ONCE_COMMON[section]
    return {
        name: value
        for name, value in values.items()
        if name not in once or not means(value, once[name]) or (name in own and value != "own")
    }
