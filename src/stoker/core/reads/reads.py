"""The reads of a run, and the marks by which a file, a variable or a link is recognized as unchanged."""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from stoker.core.folder_files import (
    MAX_FILES,
    Ignored,
    file_mark,
    is_time_mark,
    listing_mark,
    parent_of,
    time_mark,
    walk,
    within,
)
from stoker.core.source_fingerprint import python_fingerprint

_LOG = logging.getLogger(__name__)

ABSENT = "absent"
"""Mark of a variable that is not set, and of a file that does not exist."""

State = tuple[int, int]
"""Size and modification time (ns) of a file. The inode's change time is not used, because a backup by hard links
changes it."""

Snapshot = Mapping[str, State]
"""Path relative to the folder -> state at the start of the run. A folder's name ends in `/`."""

_FOLDER, LEFT_OUT = (0, 0), (-1, 0)
"""The two states of a folder: its files are in the snapshot, or they are left out because there are too many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """The files, variables and folders that were read, with their state at the start of the run."""

    files: dict[str, str] = field(default_factory=dict)
    """File (relative to the folder, or absolute) -> mark of its content."""

    environment: dict[str, str] = field(default_factory=dict)
    """Variable -> hash of its value, or `ABSENT`. Values can be secrets, so they are not stored."""

    listings: dict[str, str] = field(default_factory=dict)
    """Listed folder (relative to the user's) -> mark of the names in it."""

    own: list[str] = field(default_factory=list)
    """Names that the run has created, relative to the user's folder. The marks of `listings` leave them out. A name
    that ends in `/` is a folder for outputs of experiments; see `listing_mark`."""

    appeared: list[str] = field(default_factory=list)
    """Names that an unknown process has created during the run. The marks of `listings` leave them out, except for
    folders from which the run has read data."""

    def __bool__(self) -> bool:
        """Whether anything was read."""
        return bool(self.files or self.environment or self.listings)

    def and_also(self, others: Reads) -> Reads:
        """Return both records combined. If both have a mark for a name, this record's mark is kept."""
        return Reads(
            files=others.files | self.files,
            environment=others.environment | self.environment,
            listings=others.listings | self.listings,
            own=sorted({*self.own, *others.own}),
            appeared=sorted({*self.appeared, *others.appeared}),
        )

    def besides(self, others: Reads) -> Reads:
        """Return this record, extended by the names that other stages of the run have created."""
        both = self.and_also(others)
        return replace(self, own=both.own, appeared=both.appeared)

    def not_listed(self) -> frozenset[str]:
        """Return the names that the marks of listings leave out."""
        with_data = {parent_of(name) for name in self.files if not name.endswith(".py")}
        theirs = (name for name in self.appeared if parent_of(name) not in with_data)
        return frozenset((*self.own, *theirs))

    def as_identity(self) -> dict[str, dict[str, str]]:
        """Return the record as parts of a run's identity, without files and variables that are absent."""
        parts = {"file": self.files, "environment": self.environment, "folder": self.listings}
        return {
            part: {name: mark for name, mark in marks.items() if mark != ABSENT}
            for part, marks in parts.items()
        }

    def now(self, folder: Path) -> Reads:
        """Return the same files, variables and listings with their current marks."""
        own = self.not_listed()
        return replace(
            self,
            files={name: _mark_now(folder / name, mark) for name, mark in self.files.items()},
            environment={name: variable_mark(name) for name in self.environment},
            listings={name: listing_mark(folder, name, own=own) for name in self.listings},
        )


def _mark_now(path: Path, before: str) -> str:
    """Return the current mark of a file or link, of the same kind (content, time, target) as its earlier mark."""
    if before.startswith(_LINK):
        return link_mark(path)
    return mark_of(path, by_time=is_time_mark(before))


_LINK = "link:"
"""Prefix of the mark of a link; the link's target follows."""


def link_mark(path: Path) -> str:
    """Return the mark of a link, which contains its target; `ABSENT` if the link does not exist."""
    try:
        return f"{_LINK}{path.readlink()}"
    except OSError:
        return ABSENT


def mark_of(path: Path, *, by_time: bool = False) -> str:
    """Return the mark of a file's current content: for Python a hash of its code, for other files a hash of its bytes.

    Args:
        path: The file.
        by_time: Use size and time instead of the content (not for Python).
    """
    try:
        if by_time and path.suffix != ".py":
            return time_mark(path)
        facts = path.stat()
        key = (path, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
        if key not in _KNOWN:
            mark = _content_mark(path)
            if time.time() - facts.st_ctime < _SETTLED_S:
                return mark
            _KNOWN[key] = mark
        return _KNOWN[key]
    except OSError:
        return ABSENT


_KNOWN: dict[tuple[object, ...], str] = {}
"""Cache of marks that this process has computed: a command needs the mark of the same file several times."""

_SETTLED_S = 2.0
"""The mark of a file that changed less than this many seconds ago is not reused: a second change may have the same
file time."""


def _content_mark(path: Path) -> str:
    if path.suffix != ".py":
        return file_mark(path)
    try:
        return python_fingerprint(path)
    except RecursionError:
        return file_mark(path)


def variable_mark(name: str) -> str:
    """Return a hash of a variable's current value, or `ABSENT`."""
    value = os.environ.get(name)
    return ABSENT if value is None else hashlib.sha256(value.encode(errors="replace")).hexdigest()


def snapshot(folder: Path, *, outputs: Collection[Path] = ()) -> dict[str, State]:
    """Return the state of every file in a folder that the user's code may read. No file is opened.

    Folders beyond the limit of `MAX_FILES` are left out, and a log line names them.

    Args:
        folder: The user's folder.
        outputs: Folders that Stoker writes; they are left out.
    """
    found: dict[str, State] = {}
    for place in walk(folder, is_ignored=Ignored(folder), outputs=outputs):
        found[f"{place.name}/"] = LEFT_OUT if place.left_out else _FOLDER
        for entry in place.files:
            state = state_of(entry)
            if state is not None:
                found[within(place.name, entry.name)] = state
    left_out = [name for name, state in found.items() if state == LEFT_OUT]
    if left_out:
        _say_left_out(tuple(left_out))
    return found


@functools.cache
def _say_left_out(folders: tuple[str, ...]) -> None:
    """Log once in a process which folders are left out."""
    named = ", ".join(folders[:_NAMED]) + (
        f" and {more} more" if (more := len(folders) - _NAMED) > 0 else ""
    )
    _LOG.warning(
        "changes of files in %s are not noticed: at most %s files of the experiment's folder are observed. "
        "After a change there, train with --again; or list files that the code does not read in .stokerignore",
        named,
        f"{MAX_FILES:,}",
    )


_NAMED = 3
"""Maximum number of folders that the warning of `_say_left_out` names."""


def state_of(path: Path | os.DirEntry[str]) -> State | None:
    """Return the current state of a file; None if it does not exist."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_size, facts.st_mtime_ns
