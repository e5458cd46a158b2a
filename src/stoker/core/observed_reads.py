"""Which files and variables of the environment the user's code reads, seen while it runs.

The source does not say it: a path can be computed, and NumPy, PyArrow, OpenCV, HDF5 and TensorFlow
read in C. So reads are observed: below the user's folder by inotify (Linux), which sees every
reader; outside of it by Python's audit hook, which sees what Python itself opens; of the environment
by `os.environ`. A read of another process below the folder counts too: inotify does not say who
reads.

A file counts with the content that it had when the run began. One that did not exist then, or was
written before it was read, is the run's own and never counts; of times of files nothing is
concluded. A variable counts with the value that it had, unless the code has set it itself.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.core.code import python_fingerprint
from stoker.core.folder_files import (
    file_mark,
    ignored,
    ignored_variables,
    is_time_mark,
    time_mark,
)
from stoker.core.inotify import FolderWatch, is_available

_LOG = logging.getLogger(__name__)

ABSENT = "absent"
"""What a variable that is not set, or a file that is gone, counts as."""

_SWEEP = 20
"""More variables than these, read by one line of code, are a copy of the environment."""

_HASHED_FILES = 2_000
"""From so many files on, size and time count instead of the content: a folder of images."""

_STOKER = Path(__file__).resolve().parents[1]
_NOT_THE_USERS = tuple(
    str(Path(place).resolve())
    for place in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        *(str(_STOKER), "/proc", "/sys", "/dev", sys.base_prefix),
    )
    if place
)
"""Folders whose files are the system's or a library's: versions of those count by themselves."""

State = tuple[int, int, int, int]
"""Size, times of the last change of content and of the entry, and number of a file."""

Snapshot = Mapping[str, State]
"""File, relative to the folder -> its state when the run began."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """What was read, each with what it held when the run began."""

    files: dict[str, str] = field(default_factory=dict)
    """File, relative to the folder or absolute -> mark of its content."""

    environment: dict[str, str] = field(default_factory=dict)
    """Variable -> hash of its value, or `ABSENT`; values can be secrets."""

    def __bool__(self) -> bool:
        """Whether anything was read."""
        return bool(self.files or self.environment)

    def and_also(self, others: Reads) -> Reads:
        """Both; what was seen first counts."""
        return Reads(
            files=others.files | self.files, environment=others.environment | self.environment
        )

    def as_identity(self) -> dict[str, dict[str, str]]:
        """The same as parts of an identity: what is absent has no entry."""
        parts = {"file": self.files, "environment": self.environment}
        return {
            part: {name: mark for name, mark in marks.items() if mark != ABSENT}
            for part, marks in parts.items()
        }

    def now(self, folder: Path) -> Reads:
        """The same files and variables with what they hold now."""
        return Reads(
            files={
                name: mark_of(folder / name, by_time=is_time_mark(mark))
                for name, mark in self.files.items()
            },
            environment={name: variable_mark(name) for name in self.environment},
        )


def mark_of(path: Path, *, by_time: bool = False) -> str:
    """What a file holds now: of Python its code, of other files their bytes.

    Args:
        path: The file.
        by_time: Take size and time instead: for one of very many.
    """
    try:
        if path.suffix == ".py":
            return python_fingerprint(path)
        return time_mark(path) if by_time else file_mark(path)
    except OSError:
        return ABSENT


def variable_mark(name: str) -> str:
    """A hash of a variable's value now, or `ABSENT`."""
    value = os.environ.get(name)
    return ABSENT if value is None else hashlib.sha256(value.encode(errors="replace")).hexdigest()


def snapshot(folder: Path, *, outputs: Collection[Path] = ()) -> dict[str, State]:
    """The state of every file of a folder that could be read; nothing is opened.

    Args:
        folder: The user's folder.
        outputs: Folders that Stoker itself writes.
    """
    found: dict[str, State] = {}
    for path in _walk(folder, outputs):
        state = _state(path)
        if state is not None:
            found[path.relative_to(folder).as_posix()] = state
    return found


def _walk(folder: Path, outputs: Collection[Path]) -> Iterator[Path]:
    is_ignored = ignored(folder)
    for place, folders, names in os.walk(folder):
        here = Path(place)
        folders[:] = [n for n in folders if not is_ignored(here / n) and here / n not in outputs]
        yield from (here / name for name in names if not is_ignored(here / name))


def _state(path: Path) -> State | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino


class Observer:
    """Collects what is read from its beginning on."""

    def __init__(
        self,
        folder: Path,
        *,
        at_begin: Snapshot,
        outputs: Collection[Path],
        followed: Collection[Path],
        write: Callable[[Reads], None],
    ) -> None:
        """Begin.

        Args:
            folder: The user's folder.
            at_begin: `snapshot` of it when the run began.
            outputs: Folders that Stoker itself writes.
            followed: Python files that count by their source already.
            write: Keeps all that was read; called in any thread whenever there is more of it.
        """
        self.folder = folder.resolve()
        self._at_begin, self._outputs = at_begin, tuple(path.resolve() for path in outputs)
        self._followed = frozenset(followed)
        self._write = write
        self._ignored = ignored(self.folder)
        self._ignored_variable = ignored_variables(self.folder)
        self._environment = dict(os.environ)
        self._lock = threading.RLock()
        self._files: dict[str, str] = {}
        self._judged: set[str] = set()
        self._variables: dict[str, str] = {}
        self._by_line: dict[tuple[str, int], set[str]] = {}
        self._has_more = False

    @property
    def reads(self) -> Reads:
        """What was read until now."""
        with self._lock:
            return Reads(files=dict(self._files), environment=self._counted_variables())

    def skips(self, path: Path) -> bool:
        """Whether nothing below a folder counts."""
        return path in self._outputs or self._ignored(path)

    def write(self) -> None:
        """Keep what was read since the last time."""
        with self._lock:
            if self._has_more:
                self._has_more = False
                self._write(self.reads)

    def everything(self) -> None:
        """Take every file of the folder as read: who reads what is not known."""
        for name in self._at_begin:
            self.file(self.folder / name)

    def written(self, path: Path) -> None:
        """A file is the run's own from here on, unless it was read before."""
        with self._lock:
            name = self._name_of(path)
            if name is not None:
                self._judged.add(name)

    def file(self, path: Path) -> None:
        """A file was read."""
        with self._lock, _not_observed():
            path = _python_of(path)
            name = self._name_of(path)
            if name is None or name in self._judged:
                return
            self._judged.add(name)
            mark = self._mark_at_begin(path, name)
            if mark is not None:
                self._files[name] = mark
                self._has_more = True

    def _name_of(self, path: Path) -> str | None:
        """How a file is named; None where it does not count."""
        resolved = path.resolve()
        if resolved in self._followed or any(resolved.is_relative_to(o) for o in self._outputs):
            return None
        if resolved.is_relative_to(self.folder):
            return None if self._ignored(resolved) else resolved.relative_to(self.folder).as_posix()
        return None if str(resolved).startswith(_NOT_THE_USERS) else str(resolved)

    def _mark_at_begin(self, path: Path, name: str) -> str | None:
        """What it held when the run began; None where it is the run's own, or no plain file."""
        if not Path(name).is_absolute():
            before = self._at_begin.get(name)
            if before is None or tuple(before) != _state(path):
                return None
        if not path.is_file():
            return None
        mark = mark_of(path, by_time=len(self._files) >= _HASHED_FILES)
        return None if mark == ABSENT else mark

    def variable(self, name: str, line: tuple[str, int]) -> None:
        """A variable of the environment was read by a line of the user's code."""
        if self._ignored_variable(name):
            return
        with self._lock:
            self._by_line.setdefault(line, set()).add(name)
            if name in self._variables or self._environment.get(name) != os.environ.get(name):
                return
            self._variables[name] = variable_mark(name)
            self._has_more = True

    def _counted_variables(self) -> dict[str, str]:
        lines = [names for names in self._by_line.values() if len(names) <= _SWEEP]
        counted = {name for names in lines for name in names}
        return {name: mark for name, mark in self._variables.items() if name in counted}

    def is_of_the_user(self, file: str) -> bool:
        """Whether code is the user's: in the folder, and not installed there."""
        return file.startswith(f"{self.folder}{os.sep}") and not file.startswith(_NOT_THE_USERS)


def _python_of(path: Path) -> Path:
    """The source of a compiled Python file; any other file as it is."""
    if path.suffix != ".pyc":
        return path
    try:
        return Path(importlib.util.source_from_cache(str(path)))
    except ValueError:
        return path


_ACTIVE: Observer | None = None
_OURS = threading.local()


@contextmanager
def _not_observed() -> Iterator[None]:
    """What the observer itself reads is not observed."""
    _OURS.reads = True
    try:
        yield
    finally:
        _OURS.reads = False


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Observe what is read while the body runs.

    Where there is no inotify, or no watch to be had, every file of the folder counts as read.
    """
    global _ACTIVE
    _install_audit_hook()
    before, _ACTIVE = _ACTIVE, observer
    getitem = _observe_environment()
    watch = _watch(observer)
    try:
        yield
    finally:
        if watch is not None:
            watch.close()
        os._Environ.__getitem__ = getitem  # type: ignore[method-assign]  # noqa: SLF001 - as below
        _ACTIVE = before
        observer.write()


def _watch(observer: Observer) -> FolderWatch | None:
    if is_available():
        try:
            return FolderWatch(
                observer.folder,
                skip=observer.skips,
                on_read=observer.file,
                on_overflow=observer.everything,
                on_pause=observer.write,
            )
        except OSError as error:
            _LOG.warning(
                "reads of %s are not observed (%s): all files count", observer.folder, error
            )
    observer.everything()
    return None


_HOOKED = False


def _install_audit_hook() -> None:
    """Once for a process: Python has no way to take an audit hook out again."""
    global _HOOKED
    if not _HOOKED:
        _HOOKED = True
        sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "open" or _ACTIVE is None or getattr(_OURS, "reads", False):
        return
    path, _, flags = arguments
    if not isinstance(path, str | bytes | os.PathLike):
        return
    full = os.path.realpath(os.fsdecode(path))
    if full.startswith(_NOT_THE_USERS) or not _called_by_the_user(_ACTIVE):
        return
    if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_TRUNC | os.O_APPEND):
        _ACTIVE.written(Path(full))
    else:
        _ACTIVE.file(Path(full))


def _called_by_the_user(observer: Observer) -> bool:
    frame = sys._getframe(2)  # noqa: SLF001 - documented, and the only quick way
    while frame is not None:
        if observer.is_of_the_user(frame.f_code.co_filename):
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return False


_BETWEEN = frozenset((os.__file__, "<frozen os>", "<frozen _collections_abc>"))
"""Files of the standard library between a line that reads a variable and `os.environ`."""


def _observe_environment() -> Any:
    """Observe `os.environ[...]` and what calls it; returns what was there before."""
    before = os._Environ.__getitem__  # noqa: SLF001 - no other place sees a read

    def getitem(self: Any, key: str) -> str:
        observer = _ACTIVE
        if observer is not None and self is os.environ and isinstance(key, str):
            frame = sys._getframe(1)  # noqa: SLF001 - as above
            while frame.f_back is not None and _is_between(frame.f_code.co_filename):
                frame = frame.f_back
            if observer.is_of_the_user(frame.f_code.co_filename):
                observer.variable(key, (frame.f_code.co_filename, frame.f_lineno))
        return before(self, key)

    os._Environ.__getitem__ = getitem  # type: ignore[assignment,method-assign]  # noqa: SLF001
    return before


def _is_between(file: str) -> bool:
    return file in _BETWEEN or file.endswith("_collections_abc.py")
