"""Which files and environment variables the user's code reads, observed while it runs.

The source does not show it: a path can be computed, and NumPy, PyArrow, OpenCV, HDF5 and TensorFlow
read files in C. So reads are observed: below the user's folder with inotify (Linux), which sees
every reader; outside it with Python's audit hook, which sees files that Python itself opens; and
environment variables through `os.environ`. A read by another process below the folder counts too,
because inotify does not identify the reader.

A file counts with its content at the start of the run. A file that did not exist then, or was
written before it was read, belongs to the run and never counts. File times are not used for that
decision. A variable counts with its value, unless the code has set it itself.
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
"""Mark of a variable that is not set, or of a missing file."""

_SWEEP = 20
"""If one line of code reads more variables than this, it copies the whole environment."""

WRITE_S = 0.5
"""Least time between two writes of the list of reads, seconds: a long list takes long to write."""

_HASHED_FILES = 2_000
"""From this number of files on (a folder of images), size and time count instead of content."""

_STOKER = Path(__file__).resolve().parents[1]
_NOT_THE_USERS = tuple(
    str(Path(place).resolve())
    for place in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        *(str(_STOKER), "/proc", "/sys", "/etc", "/run", "/var/run"),
    )
    if place
)
"""Folders of the system or of libraries, whose versions already count."""


def _is_within(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def _is_of_the_system(path: str) -> bool:
    """Whether a file outside of the user's folder never counts: devices, settings of accounts too."""
    if path.startswith("/dev/"):
        return not path.startswith("/dev/shm/")  # noqa: S108 - data of users lies there
    return _is_within(path, _NOT_THE_USERS) or path.startswith(f"{Path.home()}{os.sep}.")


State = tuple[int, int]
"""Size and modification time (ns) of a file. A backup by hard links changes the change time, so that
one does not count."""

Snapshot = Mapping[str, State]
"""File, relative to the folder -> its state at the start of the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """What was read, with its state at the start of the run."""

    files: dict[str, str] = field(default_factory=dict)
    """File, relative to the folder or absolute -> mark of its content."""

    environment: dict[str, str] = field(default_factory=dict)
    """Variable -> hash of its value, or `ABSENT`; values can be secrets."""

    def __bool__(self) -> bool:
        """Whether anything was read."""
        return bool(self.files or self.environment)

    def and_also(self, others: Reads) -> Reads:
        """Both combined; the mark that was recorded first counts."""
        return Reads(
            files=others.files | self.files, environment=others.environment | self.environment
        )

    def as_identity(self) -> dict[str, dict[str, str]]:
        """The same as parts of an identity: absent files and variables have no entry."""
        parts = {"file": self.files, "environment": self.environment}
        return {
            part: {name: mark for name, mark in marks.items() if mark != ABSENT}
            for part, marks in parts.items()
        }

    def now(self, folder: Path) -> Reads:
        """The same files and variables with their current content."""
        return Reads(
            files={
                name: mark_of(folder / name, by_time=is_time_mark(mark))
                for name, mark in self.files.items()
            },
            environment={name: variable_mark(name) for name in self.environment},
        )


def mark_of(path: Path, *, by_time: bool = False) -> str:
    """The mark of a file's current content: of Python its code, of other files their bytes.

    Args:
        path: The file.
        by_time: Use size and time instead, because the file is one of very many.
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
    """A hash of a variable's current value, or `ABSENT`."""
    value = os.environ.get(name)
    return ABSENT if value is None else hashlib.sha256(value.encode(errors="replace")).hexdigest()


def snapshot(folder: Path, *, outputs: Collection[Path] = ()) -> dict[str, State]:
    """The state of every file in a folder that may be read; no file is opened.

    Args:
        folder: The user's folder.
        outputs: Folders that Stoker writes.
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
    """Collects reads from its creation on."""

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
        """Start observing.

        Args:
            folder: The user's folder.
            at_begin: `snapshot` of it when the run began.
            before: What an earlier process of the run read in the same stage.
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
        """What was read so far."""
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
        """Count every file in the folder as read, because its reads are unknown."""
        for name in self._at_begin:
            self.file(self.folder / name)

    def written(self, path: Path) -> None:
        """Record a write: the file belongs to the run and does not count, also if it was read before."""
        with self._lock:
            name = self._name_of(path)
            if name is not None:
                self._judged.add(name)
                self._has_more |= self._files.pop(name, None) is not None

    def file(self, path: Path) -> None:
        """Record that a file was read."""
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
        """The recorded name of a file; None if it does not count."""
        resolved = path.resolve()
        if resolved in self._followed or any(resolved.is_relative_to(o) for o in self._outputs):
            return None
        if resolved.is_relative_to(self.folder):
            return None if self._ignored(resolved) else resolved.relative_to(self.folder).as_posix()
        if _is_of_the_system(str(resolved)) or self._ignored_outside(str(resolved)):
            return None
        return str(resolved)

    def _mark_at_begin(self, path: Path, name: str) -> str | None:
        """Its mark at the start of the run; None if it is the run's own, or not a regular file."""
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
    """The source file of a compiled Python file; any other file unchanged."""
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
    """Do not observe the observer's own reads."""
    _OURS.reads = True
    try:
        yield
    finally:
        _OURS.reads = False


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Observe reads while the body runs.

    If inotify is unavailable or out of watches, every file in the folder counts as read.
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
    """Install the audit hook once per process: Python cannot remove one."""
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
        # A callback's log: what the run writes does not count, even if Keras opened it.
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
"""Standard library files on the stack between a line that reads a variable and `os.environ`."""


def _observe_environment() -> Any:
    """Observe reads through `os.environ`; return what was there before."""
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
