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
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stoker.core.code import python_fingerprint
from stoker.core.folder_files import (
    file_mark,
    ignored,
    ignored_outside,
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

WRITE_S = 0.5
"""Least time between two writes of what was read: of many files each would take long."""

_HASHED_FILES = 2_000
"""From so many files on, size and time count instead of the content: a folder of images."""

_STOKER = Path(__file__).resolve().parents[1]
_NOT_THE_USERS = tuple(
    str(Path(place).resolve())
    for place in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        *(str(_STOKER), "/proc", "/sys", "/etc", "/run", "/var/run"),
    )
    if place
)
"""Folders whose files are the system's or a library's: versions of those count by themselves."""


def _is_within(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def _is_of_the_system(path: str) -> bool:
    """Whether a file outside of the user's folder never counts: devices, settings of accounts too."""
    if path.startswith("/dev/"):
        return not path.startswith("/dev/shm/")  # noqa: S108 - data of users lies there
    return _is_within(path, _NOT_THE_USERS) or path.startswith(f"{Path.home()}{os.sep}.")


State = tuple[int, int]
"""Size of a file, and time of the last change of its content, nanoseconds. Of its entry nothing: a
backup by links changes that."""

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
    except RecursionError:
        return file_mark(path)
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
    return facts.st_size, facts.st_mtime_ns


class Observer:
    """Collects what is read from its beginning on."""

    def __init__(
        self,
        folder: Path,
        *,
        at_begin: Snapshot,
        before: Reads,
        outputs: Collection[Path],
        followed: Collection[Path],
        write: Callable[[Reads], None],
    ) -> None:
        """Begin.

        Args:
            folder: The user's folder.
            at_begin: `snapshot` of it when the run began.
            before: What an earlier process read for the same work.
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
        self._ignored_outside = ignored_outside(self.folder)
        self._environment = dict(os.environ)
        self._lock = threading.RLock()
        self._files: dict[str, str] = dict(before.files)
        self._before = dict(before.environment)
        self._judged: set[str] = set(before.files)
        self._variables: dict[str, str] = {}
        self._by_line: dict[tuple[str, int], set[str]] = {}
        self._has_more, self._written_s = False, 0.0

    @property
    def reads(self) -> Reads:
        """What was read until now."""
        with self._lock:
            return Reads(files=dict(self._files), environment=self._counted_variables())

    def skips(self, path: Path) -> bool:
        """Whether nothing below a folder counts."""
        return path in self._outputs or self._ignored(path)

    def write(self) -> None:
        """Keep what was read since the last time, at most once in `WRITE_S`."""
        if self._has_more and time.monotonic() - self._written_s >= WRITE_S:
            self.flush()

    def flush(self) -> None:
        """Keep what was read since the last time, now."""
        with self._lock:
            if self._has_more:
                self._write(self.reads)
                self._has_more, self._written_s = False, time.monotonic()

    def everything(self) -> None:
        """Take every file of the folder as read: who reads what is not known."""
        for name in self._at_begin:
            self.file(self.folder / name)

    def written(self, path: Path) -> None:
        """A file is the run's own: it does not count, whether it was read before or not."""
        with self._lock:
            name = self._name_of(path)
            if name is not None:
                self._judged.add(name)
                self._has_more |= self._files.pop(name, None) is not None

    def file(self, path: Path) -> None:
        """A file was read."""
        path = _python_of(path)
        name = self._name_of(path)
        with self._lock:
            if name is None or name in self._judged:
                return
            self._judged.add(name)
        with _not_observed():
            mark = self._mark_at_begin(path, name)
        if mark is not None:
            with self._lock:
                self._files[name] = mark
                self._has_more = True

    def _name_of(self, path: Path) -> str | None:
        """How a file is named; None where it does not count."""
        resolved = path.resolve()
        if resolved in self._followed or any(resolved.is_relative_to(o) for o in self._outputs):
            return None
        if resolved.is_relative_to(self.folder):
            return None if self._ignored(resolved) else resolved.relative_to(self.folder).as_posix()
        if _is_of_the_system(str(resolved)) or self._ignored_outside(str(resolved)):
            return None
        return str(resolved)

    def _mark_at_begin(self, path: Path, name: str) -> str | None:
        """What it held when the run began; None where it is the run's own, or no plain file."""
        if not Path(name).is_absolute():
            before, now = self._at_begin.get(name), _state(path)
            if before is None or now is None or tuple(before) != now:
                return None
        if not path.is_file():
            return None
        mark = mark_of(path, by_time=len(self._files) >= _HASHED_FILES)
        return None if mark == ABSENT else mark

    def variable(self, name: str, line: tuple[str, int]) -> None:
        """A variable of the environment was read by a line of the user's code."""
        with self._lock:
            self._by_line.setdefault(line, set()).add(name)
            if (
                self._ignored_variable(name)
                or name in self._variables
                or self._environment.get(name) != os.environ.get(name)
            ):
                return
            self._variables[name] = variable_mark(name)
            self._has_more = True

    def _counted_variables(self) -> dict[str, str]:
        everything = set(self._environment)
        lines = [
            names
            for names in self._by_line.values()
            if len(names) <= _SWEEP and not names >= everything
        ]
        counted = {name for names in lines for name in names}
        found = {name: mark for name, mark in self._variables.items() if name in counted}
        return found | self._before

    def is_of_the_user(self, file: str) -> bool:
        """Whether code is the user's: in the folder, and not installed there."""
        return _is_within(file, (str(self.folder),)) and not _is_within(file, _NOT_THE_USERS)


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
        observer.flush()


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
        os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """A forked child does not observe: the thread and perhaps the lock are its parent's."""
    global _ACTIVE
    _ACTIVE = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    observer = _ACTIVE
    if event != "open" or observer is None or getattr(_OURS, "reads", False):
        return
    path, _, flags = arguments
    if isinstance(path, str | bytes | os.PathLike):
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_APPEND)
        _opened(observer, os.path.realpath(os.fsdecode(path)), writes=bool(writes))


def _opened(observer: Observer, full: str, *, writes: bool) -> None:
    if writes and _is_within(full, (str(observer.folder),)):
        # A callback's log, whoever opens it: what the run writes is its own.
        observer.written(Path(full))
    elif not _is_of_the_system(full) and _called_by_the_user(observer):
        (observer.written if writes else observer.file)(Path(full))


def _called_by_the_user(observer: Observer) -> bool:
    frame = sys._getframe(3)  # noqa: SLF001 - documented, and the only quick way
    while frame is not None:
        if observer.is_of_the_user(frame.f_code.co_filename):
            return True
        if _is_within(frame.f_code.co_filename, (str(_STOKER),)):
            # Ours, however the user's script came to call us.
            return False
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
