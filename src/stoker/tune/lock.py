"""`stoker.lock.yaml`: the settings that a tuning kept, the machine, and the measurements.

The file is next to `stoker.yaml` and should be committed. If a setting of `stoker.yaml` was changed
after the tuning, it takes precedence over the lock file's.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from stoker.core.config import read_yaml
from stoker.core.errors import ConfigError, Plain
from stoker.core.files import write_atomic

FILE = "stoker.lock.yaml"
"""Name of the lock file."""

FORMAT = 1
"""Version of the lock file's format."""

_FIX = "Run `stoker tune` again, or delete it."

_HEAD = """\
# Written by `stoker tune`. `stoker run` uses it where the hardware matches, `stoker tune --check`
# measures whether it still holds. Delete it to go back to stoker.yaml alone.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """Content of a lock file."""

    settings: dict[str, Any]
    """Dotted name of a setting of `stoker.yaml` -> value that the tuning kept."""

    replaced: dict[str, Any]
    """The same names -> values in `stoker.yaml` during the tuning; a setting is used only if this value is
    still in `stoker.yaml`."""

    hardware: dict[str, Any]
    """Description of the machine: its CPU cores, memory and GPUs."""

    code: dict[str, str]
    """`module:function` -> fingerprint of the code that was measured."""

    gains: list[dict[str, Any]] = field(default_factory=list)
    """Gain of each kept lever: ratio and interval."""

    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    """Figures before and after the tuning: busy_fraction, input_wait, samples_per_s, step_s, epoch_s,
    usd_per_epoch."""

    tuned: dict[str, Any] = field(default_factory=dict)
    """Time and duration of the tuning, versions, and the path of the ledger."""

    format: int = FORMAT


def write_lock(path: Path, lock: Lock) -> None:
    """Write a lock file atomically, with a comment for its reader."""
    write_atomic(path, _HEAD + yaml.safe_dump(asdict(lock), sort_keys=False, width=100))


def read_lock(path: Path) -> Lock | None:
    """Read and check a lock file; return None if the file does not exist.

    Raises:
        ConfigError: the file is not a lock file of this format.
    """
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise ConfigError(f"{path} must be a lock file", got=Plain("not a regular file"), fix=_FIX)
    raw = read_yaml(path)
    _check(path, raw)
    return Lock(**raw)


def _check(path: Path, raw: Mapping[str, Any]) -> None:
    if raw.get("format") != FORMAT:
        raise ConfigError(
            f"{path} must be a lock file of format {FORMAT}", got=raw.get("format"), fix=_FIX
        )
    known = {each.name: each for each in fields(Lock)}
    kinds: dict[str, type] = dict.fromkeys(known, dict) | {"gains": list, "format": int}
    for name in ("settings", "replaced", "hardware", "code"):
        if name not in raw:
            raise ConfigError(f"{path} must contain {name}", got=Plain("nothing"), fix=_FIX)
    for name, value in raw.items():
        if name not in known or not isinstance(value, kinds[name]):
            raise ConfigError(
                f"{path}: a lock file cannot contain this {name}", got=value, fix=_FIX
            )
    for name in raw["settings"]:
        if not isinstance(name, str) or not all(name.split(".")):
            raise ConfigError(f"{path}: each setting must have a dotted name", got=name, fix=_FIX)
    for name in raw["code"]:
        if not isinstance(name, str) or not all(name.partition(":")):
            raise ConfigError(
                f"{path}: a key of `code` must be module:function", got=name, fix=_FIX
            )


def differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a clause for each difference between two descriptions of hardware.

    More memory, or at most 10 % less, is not a difference.
    """
    return [
        f"{name} {now.get(name, 'not there')}, not {was.get(name, 'known')}"
        for name in {**was, **now}
        if was.get(name) != now.get(name) and not (name == _MEMORY and _is_enough(was, now))
    ]


_MEMORY = "memory_gib"


def _is_enough(was: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    needed, here = was.get(_MEMORY), now.get(_MEMORY)
    if needed is None:
        return True
    both = isinstance(needed, int | float) and isinstance(here, int | float)
    return both and here >= _LITTLE_LESS * needed


_LITTLE_LESS = 0.9
