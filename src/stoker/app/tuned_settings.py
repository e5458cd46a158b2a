"""An experiment with what its lock file says, where that still holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.app.experiment import Experiment, load_experiment
from stoker.cluster.devices import find_devices, hardware
from stoker.core.config import build
from stoker.core.errors import ConfigError, Plain
from stoker.core.fingerprint import fingerprint
from stoker.tune.lock import FILE, Lock, differing, read_lock

_LOG = logging.getLogger("stoker")


def load_tuned(target: Path, *, overrides: Sequence[str] = ()) -> tuple[Experiment, str]:
    """Read an experiment, and its lock file where there is one.

    Args:
        target: The folder with `stoker.yaml`, or the file itself.
        overrides: `dotted.key=value`; they count more than the lock.

    Returns:
        The experiment, and a line about the lock for a person; "" where there is none.

    Raises:
        ConfigError: what is wrong, in one line.
    """
    experiment = load_experiment(target, overrides=overrides)
    lock = read_lock(experiment.folder / FILE)
    if lock is None:
        return experiment, ""
    named = {assignment.partition("=")[0].strip() for assignment in overrides}
    return _locked(experiment, lock, named=named)


def load(target: Path, *, overrides: Sequence[str] = ()) -> Experiment:
    """Read an experiment with what `stoker tune` kept for this machine.

    Args:
        target: The folder with `stoker.yaml`, or the file itself.
        overrides: `dotted.key=value`. Paths given here are relative to the current folder, those
            in the file to the file's.

    Raises:
        ConfigError: what is wrong, in one line.
    """
    experiment, said = load_tuned(Path(target), overrides=overrides)
    if said:
        _LOG.info("%s", said)
    return experiment


def _locked(experiment: Experiment, lock: Lock, *, named: set[str]) -> tuple[Experiment, str]:
    if not lock.settings:
        early = "" if lock.tuned.get("finished", True) else " by the time that the tuning ended"
        return experiment, f"{FILE}: nothing was found that helps here{early}"
    if others := differing(lock.hardware, hardware(find_devices())):
        return experiment, f"{FILE} is not used, it was measured elsewhere: {'; '.join(others)}"
    code = measured_code(experiment)
    if gone := [name for name in lock.code if name not in code]:
        return experiment, f"{FILE} is not used, it was measured with {', '.join(gone)}"
    changed = [name for name in lock.code if code[name] != lock.code[name]]
    used, said = _used(experiment, lock, named=named, changed=changed)
    if changed:
        said += f"; {', '.join(changed)} changed since: `stoker tune --check`"
    try:
        return with_settings(experiment, used), said
    except ConfigError as error:
        # The user looks for it in stoker.yaml else.
        raise ConfigError(f"{FILE} cannot be used: {error}") from None


def _used(
    experiment: Experiment, lock: Lock, *, named: set[str], changed: Sequence[str]
) -> tuple[dict[str, Any], str]:
    """The settings that hold still, and a line on all of them."""
    values, own = experiment.to_json(), experiment.own_dataset
    # What was kept of one dataset may be another training with the next: a cache, of what is random.
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
    said = f"{FILE}: " + (", ".join(f"{name}={value}" for name, value in used.items()) or "unused")
    if stale:
        said += f"; {', '.join(stale)} as stoker.yaml has it, which is not what was tuned"
    if others_data:
        said += f"; {', '.join(others_data)} left out, the dataset was another one"
    return used, said


def measured_code(experiment: Experiment) -> dict[str, str]:
    """`module:function` of the user's that a tuning measures -> its fingerprint.

    That of a dataset holds the options that it is called with. Where a module is gone it is empty.
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
    """The experiment with other values.

    Args:
        experiment: Any.
        settings: Dotted names of `stoker.yaml` -> values.

    Raises:
        ConfigError: one of them cannot be.
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
    """The value of a dotted name, None where there is none."""
    found: Any = values
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return None
        found = found[part]
    return found
