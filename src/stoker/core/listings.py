"""Folders that the user's code lists: each counts by the names in it.

Names that the run itself creates never count. Python's listings are seen by the audit hook, with the
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
        own: Names that do not count, relative to it.
    """
    is_ignored = Ignored(folder)
    try:
        with os.scandir(folder / name) as entries:
            found = [
                inside
                for entry in entries
                if is_ignored.keeps(entry, inside := within(name, entry.name)) and inside not in own
            ]
    except OSError:
        return ""
    return _mark(found)


def _mark(names: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted(names)).encode(errors="surrogateescape")).hexdigest()


class Listings:
    """Listed folders of a run, and what the run has created in them."""

    def __init__(
        self, at_begin: Collection[str], *, own: Iterable[str], counted: Iterable[str]
    ) -> None:
        """Begin with what earlier processes of the run saw.

        Args:
            at_begin: Names when the run began, relative to its folder; those of folders whose files
                are among them end in `/`.
            own: Names that the run has created.
            counted: Folders that were listed.
        """
        self._at_begin = at_begin
        self._own: dict[str, set[str]] = {}
        self._counted, self._seen = set(counted), set[str]()
        self._with_reads, self._with_modules = set[str](), {ROOT}
        for name in own:
            self.created(name)

    @property
    def own(self) -> list[str]:
        """Names that the run has created."""
        return sorted(name for names in self._own.values() for name in names)

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
        (self._with_modules if name.endswith(".py") else self._with_reads).add(_parent(name))

    def created(self, name: str) -> bool:
        """Record that the run creates a file or a folder; whether that is news."""
        names = self._own.setdefault(_parent(name), set())
        if name in names or len(names) > MOST_OWN:
            return False
        names.add(name)
        return True

    def marks(self) -> dict[str, str]:
        """Listed folder -> mark of its names when the run began, without the run's own."""
        counted = self._counted | ((self._seen & self._with_reads) - self._with_modules)
        names: dict[str, list[str]] = {
            name: []
            for name in counted
            if self.is_folder(name) and len(self._own.get(name, ())) <= MOST_OWN
        }
        if names:
            for each in self._at_begin:
                plain = each.rstrip("/")
                parent = _parent(plain)
                if plain != ROOT and parent in names and plain not in self._own.get(parent, ()):
                    names[parent].append(plain)
        return {name: _mark(found) for name, found in names.items()}


def _parent(name: str) -> str:
    return name.rpartition("/")[0] or ROOT
