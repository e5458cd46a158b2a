"""Folders that the user's code lists. Each counts by the names in it.

Names that the run creates do not count. In a folder from which the run reads data, a new name belongs
to the run only if this process has provably created it.

The audit hook sees listings by Python, and the line of code that makes them. inotify sees all others,
but not who makes them. Such a folder counts if a file in it was read, too, and if it holds no Python
module, because Python's imports also list folders.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Iterable
from pathlib import Path

from stoker.core.folder_files import ROOT, Ignored, within

MOST_OWN = 1_000
"""If a run creates more names than this in a folder, the folder's listing does not count."""


def listing_mark(folder: Path, name: str, *, own: Collection[str]) -> str:
    """The mark of the names in a folder now; empty if the folder does not exist.

    Args:
        folder: The user's folder.
        name: The listed folder, relative to the user's.
        own: Names that do not count, relative to the user's folder. A name that ends in `/` is a
            folder in which models of other experiments do not count. Their runs never count.
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
    """The folders that a run has listed, and the names that it has created in them."""

    def __init__(
        self,
        at_begin: Collection[str],
        *,
        own: Iterable[str],
        appeared: Iterable[str] = (),
        counted: Iterable[str],
    ) -> None:
        """Start with the records of the run's earlier processes.

        Args:
            at_begin: Names at the start of the run, relative to the user's folder. The name of a
                folder ends in `/` if its files are among them.
            own: Names that the run has created.
            appeared: Names that the run or another process has created.
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
        """Names that were created during the run by an unknown process."""
        return sorted(set().union(*self._appeared.values()).difference(self.own))

    def is_folder(self, name: str) -> bool:
        """Whether this is a folder whose names at the start of the run are known."""
        return f"{name}/" in self._at_begin

    def listed(self, name: str) -> bool:
        """Record that the user's code lists a folder. True if this is new and the folder counts."""
        new = name not in self._counted and self.is_folder(name)
        self._counted |= {name} if new else set()
        return new

    def seen(self, name: str) -> bool:
        """Record that an unknown process lists a folder. True if this is new and the folder counts."""
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
        """Record a new file or folder. True if it is recorded for the first time.

        Args:
            name: Relative to the user's folder.
            by_run: The run has provably created it.
        """
        if (
            name in self._at_begin
            or self.is_folder(name)
            or name in self._own.get(parent_of(name), ())
        ):
            return False
        return _add(self._own if by_run else self._appeared, name)

    def _counts(self, name: str) -> bool:
        """Whether a listed folder counts: its names are known, and the run has not created too many."""
        most = max(
            len(self._own.get(name, ())),
            0 if name in self._with_reads else len(self._appeared.get(name, ())),
        )
        return self.is_folder(name) and most <= MOST_OWN

    def marks(self, *, own: Collection[str]) -> dict[str, str]:
        """Listed folder -> mark of its names at the start of the run, without the run's own names."""
        counted = self._counted | ((self._seen & self._with_reads) - self._with_modules)
        names: dict[str, list[str]] = {name: [] for name in counted if self._counts(name)}
        if names:
            for each in self._at_begin:
                plain = each.rstrip("/")
                if plain != ROOT and plain not in own and (parent := parent_of(plain)) in names:
                    names[parent].append(plain)
        return {name: _mark(found) for name, found in names.items()}


def _add(names: dict[str, set[str]], name: str) -> bool:
    """Add a name under its folder, up to the limit. True if it was added."""
    there = names.setdefault(parent_of(name), set())
    if name in there or len(there) > MOST_OWN:
        return False
    there.add(name)
    return True


def parent_of(name: str) -> str:
    """The folder that contains a file or folder; both paths are relative to the user's folder."""
    return name.rpartition("/")[0] or ROOT
