"""Reads an experiment, and applies the settings of its lock file that are still valid."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.app.experiment import Experiment, load_experiment
from stoker.cluster.devices import find_devices, hardware
from stoker.core.config import build
from stoker.core.errors import ConfigError, Plain
from stoker.core.fingerprint import fingerprint
from stoker.tune.lock import FILE, Lock, differing, read_lock

_LOG = logging.getLogger("stoker")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadedExperiment:
    """An experiment as read from `stoker.yaml` and the lock file."""

    written: Experiment
    """The settings of `stoker.yaml` and of `--set`."""

    used: Experiment
    """`written` with the settings of the lock file that are still valid."""

    lock_note: str
    """One line about the lock file for the user; empty without a lock file."""


def load_tuned(target: Path, *, overrides: Sequence[str] = ()) -> LoadedExperiment:
    """Read an experiment, and its lock file if it has one.

    Args:
        target: The folder with `stoker.yaml`, or the file itself.
        overrides: `dotted.key=value`; they take precedence over the lock file.

    Raises:
        ConfigError: a setting is invalid.
    """
    experiment = load_experiment(target, overrides=overrides)
    lock = read_lock(experiment.folder / FILE)
    used, note = experiment, ""
    if lock is not None:
        named = {assignment.partition("=")[0].strip() for assignment in overrides}
        used, note = _locked(experiment, lock, named=named)
    return LoadedExperiment(written=experiment, used=used, lock_note=note)


def load(target: Path, *, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment with the settings that `stoker tune` kept for this machine.

    Args:
        target: The folder with `stoker.yaml`, or the file itself.
        overrides: `dotted.key=value`. A path given here is relative to the current folder; a path in the file
            is relative to the file's folder.

    Raises:
        ConfigError: a setting is invalid.
    """
    loaded = load_tuned(Path(target), overrides=overrides)
    if loaded.lock_note:
        _LOG.info("%s", loaded.lock_note)
    return loaded.used


def _locked(experiment: Experiment, lock: Lock, *, named: set[str]) -> tuple[Experiment, str]:
    if not lock.settings:
        early = "" if lock.tuned.get("finished", True) else " before the tuning ended"
        return experiment, f"{FILE}: no setting was found that helps here{early}"
    if others := differing(lock.hardware, hardware(find_devices())):
        return (
            experiment,
            f"{FILE} is not used, it was measured on another machine: {'; '.join(others)}",
        )
    code = measured_code(experiment)
    if gone := [name for name in lock.code if name not in code]:
        return experiment, f"{FILE} is not used, it was measured with {', '.join(gone)}"
    changed = [name for name in lock.code if code[name] != lock.code[name]]
    used, note = _used(experiment, lock, named=named, changed=changed)
    if changed:
        note += f"; {', '.join(changed)} changed since: `stoker tune --check`"
    try:
        return with_settings(experiment, used), note
    except ConfigError as error:
        # Name the lock file in the error, because the user would look in stoker.yaml.
        raise ConfigError(f"{FILE} cannot be used: {error}") from None


def _used(
    experiment: Experiment, lock: Lock, *, named: set[str], changed: Sequence[str]
) -> tuple[dict[str, Any], str]:
    """Return the lock file's settings that are still valid, and a line about all its settings."""
    values, own = experiment.to_json(), experiment.own_dataset
    # A setting kept for one dataset may change the training on another dataset: a cache, for example, repeats the
    # random values of the first pass.
    other_data = own is not None and own.dataset in changed
    used, stale, others_data = {}, [], []
    for name, value in lock.settings.items():
        if name in named:
            continue
        if value_at(values, name) != lock.replaced.get(name):
            stale.append(name)
        elif other_data and name.startswith("data."):
            others_data.append(name)
        else:
            used[name] = value
    note = f"{FILE}: " + (", ".join(f"{name}={value}" for name, value in used.items()) or "unused")
    if stale:
        note += f"; {', '.join(stale)} as in stoker.yaml, which was changed since the tuning"
    if others_data:
        note += f"; {', '.join(others_data)} left out, the dataset has changed"
    return used, note


def measured_code(experiment: Experiment) -> dict[str, str]:
    """Return `module:function` -> fingerprint, for each user function that a tuning measures.

    The fingerprint of a dataset covers its options. The fingerprint of a missing module is empty.
    """
    named = (experiment.model, experiment.preprocessing, experiment.train.callbacks)
    found = {name: _code_of(experiment, name) for name in named if name is not None}
    if (own := experiment.own_dataset) is not None:
        code = _code_of(experiment, own.dataset)
        found[own.dataset] = fingerprint({"code": code, "options": own.options}) if code else ""
    return found


def _code_of(experiment: Experiment, reference: str) -> str:
    try:
        return experiment.code_fingerprint(reference)
    except OSError:
        return ""


def with_settings(experiment: Experiment, settings: Mapping[str, Any]) -> Experiment:
    """Return the experiment with other values.

    Args:
        experiment: The experiment to change.
        settings: Values by dotted name of `stoker.yaml`.

    Raises:
        ConfigError: a name or a value is not valid.
    """
    if not settings:
        return experiment
    values = experiment.to_json()
    for name, value in settings.items():
        *sections, last = name.split(".")
        where: Any = values
        for section in sections:
            where = where.get(section)
            if not isinstance(where, dict):
                raise ConfigError(
                    f"{name} must be a setting of stoker.yaml",
                    got=Plain(f"no section {section!r}"),
                    fix=f"Run `stoker tune` again, or delete {FILE}.",
                )
        where[last] = value
    return build(Experiment, values)


def value_at(values: Mapping[str, Any], name: str) -> Any:
    """Return the value of a dotted name, or None if it is missing."""
    found: Any = values
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found
