"""`stoker.lock.yaml`: the settings that a tuning kept, its machine, and its measurements.

The file is next to `stoker.yaml` and should be committed. A setting that was changed in
`stoker.yaml` since then takes precedence.
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
"""File name."""

FORMAT = 1
"""Version of the format."""

_FIX = "Run `stoker tune` again, or delete it."

_HEAD = """\
# Written by `stoker tune`. `stoker run` uses it where the hardware matches, `stoker tune --check`
# measures whether it still holds. Delete it to go back to stoker.yaml alone.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """Content of a lock file."""

    settings: dict[str, Any]
    """Dotted names of `stoker.yaml` -> kept values."""

    replaced: dict[str, Any]
    """The same names -> values of `stoker.yaml` when it was tuned; only for them is the setting valid."""

    hardware: dict[str, Any]
    """The machine, see `hardware`."""

    code: dict[str, str]
    """`module:function` -> fingerprint of the measured code."""

    gains: list[dict[str, Any]] = field(default_factory=list)
    """Ratio and interval of each lever."""

    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    """busy_fraction, input_wait, samples_per_s, step_s, epoch_s, usd_per_epoch."""

    tuned: dict[str, Any] = field(default_factory=dict)
    """Time, duration, versions, and the path of the ledger."""

    format: int = FORMAT


def write_lock(path: Path, lock: Lock) -> None:
    """Write a lock file atomically."""
    write_atomic(path, _HEAD + yaml.safe_dump(asdict(lock), sort_keys=False, width=100))


def read_lock(path: Path) -> Lock | None:
    """Read a lock file; return None if the file does not exist.

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
            raise ConfigError(f"{path} must hold {name}", got=Plain("nothing"), fix=_FIX)
    for name, value in raw.items():
        if name not in known or not isinstance(value, kinds[name]):
            raise ConfigError(f"{path}: {name} is not what a lock file holds", got=value, fix=_FIX)
    for name in raw["settings"]:
        if not isinstance(name, str) or not all(name.split(".")):
            raise ConfigError(f"{path}: a setting must have a name", got=name, fix=_FIX)
    for name in raw["code"]:
        if not isinstance(name, str) or not all(name.partition(":")):
            raise ConfigError(f"{path}: code must be named module:function", got=name, fix=_FIX)


def differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return the differences between two descriptions of hardware, as text.

    More memory, or slightly less, does not count as a difference.
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
