"""Folders that the user's code lists: each counts by the names in it.

Names that the run itself creates never count; of what appears in a folder while the run reads data
there, only those that this process has provably created are its own. Python's listings are seen by the audit hook, with the
line that makes them; others only by inotify, which does not tell who lists: such a folder counts if
a file in it was read too, and it holds no Python module, for Python's imports list folders as well.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from stoker.core.folder_files import ROOT, Ignored, within

MOST_OWN = 1_000
"""If a run creates more names than this in a folder, its listing does not count."""


def listing_mark(folder: Path, name: str, *, own: Collection[str]) -> str:
    """The mark of the names that are in a folder now; empty if it does not exist.

    Args:
        folder: The user's folder.
        name: Of the listed folder, relative to it.
        own: Names that do not count, relative to it. A name that ends in `/` is a folder in which
            other experiments' models do not count either; folders of their runs never count.
    """
    is_ignored, with_versions = Ignored(folder), f"{name}/" in own
    try:
        with os.scandir(folder / name) as entries:
            found = [
                inside
                for entry in entries
                if not is_ignored.named(inside := within(name, entry.name), entry.name)
                and inside not in own
                and not is_ignored.holds_outputs(inside, versions=with_versions)
            ]
    except OSError:
        return ""
    return _mark(found)


def _mark(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode(errors="surrogateescape")).hexdigest()


class Listings:
    """Listed folders of a run, and what the run has created in them."""

    def __init__(
        self,
        at_begin: Collection[str],
        *,
        own: Iterable[str],
        appeared: Iterable[str] = (),
        counted: Iterable[str],
    ) -> None:
        """Begin with what earlier processes of the run saw.

        Args:
            at_begin: Names when the run began, relative to its folder; those of folders whose files
                are among them end in `/`.
            own: Names that the run has created.
            appeared: Names that somebody has created.
            counted: Folders that were listed.
        """
        self._at_begin = at_begin
        self._own: dict[str, set[str]] = {}
        self._appeared: dict[str, set[str]] = {}
        self._counted, self._seen = set(counted), set[str]()
        self._with_reads, self._with_modules = set[str](), {ROOT}
        for name in own:
            _add(self._own, name)
        for name in appeared:
            _add(self._appeared, name)

    @property
    def own(self) -> list[str]:
        """Names that the run has created."""
        return sorted(name for names in self._own.values() for name in names)

    @property
    def appeared(self) -> list[str]:
        """Names that somebody has created during the run; who, is not known."""
        return sorted(set().union(*self._appeared.values()).difference(self.own))

    def is_folder(self, name: str) -> bool:
        """Whether the folder and its names are known as they were when the run began."""
        return f"{name}/" in self._at_begin

    def listed(self, name: str) -> bool:
        """Record that the user's code lists a folder; whether that is news."""
        new = name not in self._counted and self.is_folder(name)
        self._counted |= {name} if new else set()
        return new

    def seen(self, name: str) -> bool:
        """Record that somebody lists a folder; whether it counts now, which is news."""
        new = name not in self._seen and name in self._with_reads - self._with_modules
        self._seen.add(name)
        return new

    def imported(self, name: str) -> None:
        """Record that a folder holds Python modules."""
        self._with_modules.add(name)

    def read(self, name: str) -> None:
        """Record that a file was read."""
        if name.endswith(".py"):
            self._with_modules.add(parent_of(name))
        else:
            self._with_reads.add(parent_of(name))

    def created(self, name: str, *, by_run: bool) -> bool:
        """Record that a file or a folder is created, provably by the run or not; whether that is news."""
        if (
            name in self._at_begin
            or self.is_folder(name)
            or name in self._own.get(parent_of(name), ())
        ):
            return False
        return _add(self._own if by_run else self._appeared, name)

    def _counts(self, name: str) -> bool:
        """Whether a listed folder's names are known, and the run has not created too many there."""
        most = max(
            len(self._own.get(name, ())),
            0 if name in self._with_reads else len(self._appeared.get(name, ())),
        )
        return self.is_folder(name) and most <= MOST_OWN

    def marks(self, *, own: Collection[str]) -> dict[str, str]:
        """Listed folder -> mark of its names when the run began, without the run's own."""
        counted = self._counted | ((self._seen & self._with_reads) - self._with_modules)
        names: dict[str, list[str]] = {name: [] for name in counted if self._counts(name)}
        if names:
            for each in self._at_begin:
                plain = each.rstrip("/")
                if plain != ROOT and plain not in own and (parent := parent_of(plain)) in names:
                    names[parent].append(plain)
        return {name: _mark(found) for name, found in names.items()}


def _add(names: dict[str, set[str]], name: str) -> bool:
    """Add a name to those of its folder, unless they are too many already; whether it is new."""
    there = names.setdefault(parent_of(name), set())
    if name in there or len(there) > MOST_OWN:
        return False
    there.add(name)
    return True


def parent_of(name: str) -> str:
    """The folder of a file or a folder, both relative to the user's."""
    return name.rpartition("/")[0] or ROOT
