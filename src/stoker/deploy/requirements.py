"""The requirements that an image installs: the versions that are installed here, and TensorFlow's CUDA libraries."""

from __future__ import annotations

import re
from importlib import metadata, resources

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from stoker.cluster.doctor.framework import cuda_packages
from stoker.core.errors import Plain, UserError

CUDA_LOCK = "requirements-cuda.lock"
"""Lock file of TensorFlow's CUDA libraries, with versions and hashes: a link to the file from which `make setup`
installs them."""


def pinned_requirements() -> list[str]:
    """Return `name==version` of all dependencies of Stoker, as installed here; not Stoker itself.

    Raises:
        UserError: a dependency is not installed.
    """
    found: dict[str, str] = {}
    todo = [("stoker", frozenset[str]())]
    seen = set()
    while todo:
        name, extras = todo.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        for requirement in _requires(name, extras):
            needed = canonicalize_name(requirement.name)
            found[needed] = _version(requirement.name)
            todo.append((needed, frozenset(requirement.extras)))
    return [f"{name}=={version}" for name, version in sorted(found.items())]


def cuda_requirements() -> str:
    """Return the lock file of TensorFlow's CUDA libraries: names, versions and hashes.

    Raises:
        UserError: the lock does not match the installed TensorFlow.
    """
    text = (resources.files(__package__) / CUDA_LOCK).read_text("utf-8")
    locked = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))
    for package in cuda_packages():
        version = locked.get(package.name)
        if version is None or not SpecifierSet(package.wanted).contains(version):
            raise UserError(
                f"the lock file of CUDA libraries must match the installed TensorFlow, which needs "
                f"{package.name}{package.wanted}",
                got=Plain("not in the lock file" if version is None else f"version {version}"),
                fix="Install the TensorFlow version for which this Stoker was released.",
            )
    return text


def _requires(name: str, extras: frozenset[str]) -> list[Requirement]:
    requirements = [Requirement(text) for text in metadata.requires(name) or []]
    return [
        requirement
        for requirement in requirements
        if requirement.marker is None
        or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))
    ]


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        raise UserError(
            f"{name} must be installed: the image gets the versions that are installed here",
            got=Plain("not installed"),
            fix="Install Stoker with all its dependencies.",
        ) from None
