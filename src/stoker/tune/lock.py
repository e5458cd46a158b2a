"""`stoker.lock.yaml`: what a tuning kept, for which machine, and what was measured.

It lies beside `stoker.yaml` and is meant to be committed. It fills what `stoker.yaml` leaves open and
never contradicts it: a setting that was changed there since is taken from there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from stoker.core.config import read_yaml
from stoker.core.errors import ConfigError, Plain
from stoker.core.files import write_atomic

FILE = "stoker.lock.yaml"
"""Name of the file."""

FORMAT = 1
"""Version of its layout."""

_HEAD = """\
# Written by `stoker tune`. `stoker run` uses it where the hardware matches, `stoker tune --check`
# measures whether it still holds. Delete it to go back to stoker.yaml alone.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lock:
    """What a lock file holds."""

    settings: dict[str, Any]
    """Dotted names of `stoker.yaml` -> what was kept."""

    replaced: dict[str, Any]
    """The same names -> what `stoker.yaml` said when it was tuned: the lock stands for that value
    only."""

    hardware: dict[str, Any]
    """What it was measured on."""

    code: dict[str, str]
    """`module:function` -> fingerprint of what was measured."""

    gains: list[dict[str, Any]] = field(default_factory=list)
    """Lever by lever: ratio and interval."""

    before: dict[str, Any] = field(default_factory=dict)
    after: dict[str, Any] = field(default_factory=dict)
    """busy_fraction, input_wait, samples_per_s, step_s, epoch_s, usd_per_epoch."""

    tuned: dict[str, Any] = field(default_factory=dict)
    """When, with which version, how long it took, and where the ledger lies."""

    format: int = FORMAT


def write_lock(path: Path, lock: Lock) -> None:
    """Write a lock file, atomically."""
    write_atomic(path, _HEAD + yaml.safe_dump(asdict(lock), sort_keys=False, width=100))


def read_lock(path: Path) -> Lock | None:
    """Read a lock file; None where there is none.

    Raises:
        ConfigError: it is no lock file, or one of a later Stoker's.
    """
    if not path.is_file():
        return None
    raw = read_yaml(path)
    fix = "Run `stoker tune` again, or delete it."
    if raw.get("format") != FORMAT:
        raise ConfigError(
            f"{path} must be a lock file of format {FORMAT}", got=raw.get("format"), fix=fix
        )
    known = {each.name: each for each in fields(Lock)}
    kinds: dict[str, type] = dict.fromkeys(known, dict) | {"gains": list, "format": int}
    for name in ("settings", "replaced", "hardware", "code"):
        if name not in raw:
            raise ConfigError(f"{path} must hold {name}", got=Plain("nothing"), fix=fix)
    for name, value in raw.items():
        if name not in known or not isinstance(value, kinds[name]):
            raise ConfigError(f"{path}: {name} is not what a lock file holds", got=value, fix=fix)
    for name in raw["settings"]:
        if not isinstance(name, str):
            raise ConfigError(f"{path}: a setting must have a name", got=name, fix=fix)
    return Lock(**raw)


def differing(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two descriptions of hardware, for a person."""
    return [
        f"{name} {now.get(name, 'not there')}, not {was.get(name, 'known')}"
        for name in {**was, **now}
        if was.get(name) != now.get(name)
    ]
