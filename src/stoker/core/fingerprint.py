"""Fingerprints of inputs: the SHA-256 of a canonical form."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import metadata
from pathlib import Path, PurePath
from typing import Any

FINGERPRINTED_LIBRARIES = (
    "tensorflow",
    "keras",
    "numpy",
    "pyarrow",
    "duckdb",
    "ibis-framework",
    "opencv-python-headless",
)
"""Libraries whose version can change a stage's output."""


def fingerprint(value: object) -> str:
    """Return the SHA-256 of a value's canonical JSON, as 64 hexadecimal digits.

    Args:
        value: Dataclasses, mappings, sequences, paths and JSON scalars, nested. The order of a
            mapping's keys does not matter; the order of a sequence does.

    Raises:
        TypeError: the value contains something without a canonical form.
    """
    text = json.dumps(_canonical(value), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def library_versions() -> dict[str, str]:
    """Return the version of each library that can change a stage's output.

    For Stoker itself, it is a hash of the sources: the installed version number does not change when
    a checkout is edited.
    """
    versions = {name: metadata.version(name) for name in FINGERPRINTED_LIBRARIES}
    python = ".".join(map(str, sys.version_info[:2]))
    return versions | {"python": python, "stoker": _own_sources()}


def _own_sources() -> str:
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted([*package.rglob("*.py"), *package.rglob("*.c")]):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def _canonical(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _canonical(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items()}
    if isinstance(value, str | int | float | bool) or value is None:
        return value
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [_canonical(item) for item in value]
    raise TypeError(f"no canonical form for {type(value).__name__}: {value!r}")
