"""The package versions that the job's image should have: from the lock file, or else as installed here."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from stoker.jobs.lock_files import PROJECT_LOCK, find_lock
from stoker.jobs.providers.kubernetes.pod.facts import FIRST

INSTALLED = (*FIRST, "numpy")
"""Packages whose versions are compared if the experiment has no lock file."""

_LINUX = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix", "extra": ""}
"""Values for environment markers in requirements, as in the image."""


def expected_versions(experiment: Path) -> tuple[str, dict[str, str]]:
    """Return where the versions come from, and package -> version.

    The lock file is the one that `find_lock` returns.
    """
    path = find_lock(experiment)
    if path is None:
        return "the submission", _installed()
    pinned = _of_project(path) if path.name == PROJECT_LOCK else _of_requirements(path)
    return path.name, dict(pinned)


def _installed() -> dict[str, str]:
    found = {}
    for name in INSTALLED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _of_requirements(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the exact versions in a file of requirements; requirements without an exact version are left out."""
    text = re.sub(r"\\\r?\n", " ", path.read_text(errors="replace"))
    for line in text.splitlines():
        try:
            found = Requirement(re.split(r"\s#|--hash=", line)[0].strip())
        except InvalidRequirement:
            continue
        versions = [each.version for each in found.specifier if each.operator == "=="]
        if versions and (found.marker is None or found.marker.evaluate(_LINUX)):
            yield canonicalize_name(found.name), versions[0]


def _of_project(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the versions in `uv.lock`; packages with several versions, for several platforms, are left out."""
    try:
        packages = tomllib.loads(path.read_text(errors="replace")).get("package", [])
    except tomllib.TOMLDecodeError:
        return
    versions: dict[str, set[str]] = {}
    for each in packages:
        if not {"virtual", "editable"} & each.get("source", {}).keys():
            versions.setdefault(str(each["name"]), set()).add(str(each.get("version", "")))
    for name, known in versions.items():
        if len(known) == 1:
            yield name, known.pop()
