"""The packages of this installation, as the image is to have them."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from stoker.core.errors import Plain, UserError


def pinned_requirements(root: str = "stoker") -> list[str]:
    """`name==version` of all that a package needs, by the versions that are installed here.

    Args:
        root: The package, itself left out.

    Raises:
        UserError: something that it needs is not installed.
    """
    found: dict[str, str] = {}
    todo = [(root, frozenset[str]())]
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
            got=Plain("it is not"),
            fix="Install Stoker with all that it needs.",
        ) from None
