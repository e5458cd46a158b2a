"""Observe which files and environment variables the user's code reads while it runs.

The source does not show what is read: a path can be computed, and NumPy, PyArrow, OpenCV, HDF5 and
TensorFlow read files in C. Below the user's folder reads are observed with inotify (Linux), which
sees every reader, but not which process it is: reads by other processes count, too. Outside the
folder they are observed with Python's audit hook, which sees only files that Python itself opens.
Environment variables are observed through `os.environ`.

A file counts with its content at the start of the run. A file that did not exist then, or was
written before it was read, belongs to the run and never counts. File times are not used for that
decision. A variable counts with its value, unless the code itself has set it. A folder below the
user's folder that is listed counts with the names in it (`listings`).
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import logging
import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stoker.core.folder_files import (
    MOST_FILES,
    Ignored,
    file_mark,
    ignored_outside,
    ignored_variables,
    is_time_mark,
    time_mark,
    walk,
    within,
)
from stoker.core.inotify import FolderWatch, is_available
from stoker.core.listings import Listings, listing_mark, parent_of
from stoker.core.source_fingerprint import python_fingerprint

_LOG = logging.getLogger(__name__)

ABSENT = "absent"
"""Mark of a variable that is not set, or of a missing file."""

_SWEEP = 20
"""A line of code that reads more variables than this is taken to copy the whole environment."""

WRITE_S = 0.5
"""Shortest time between two writes of the list of reads, seconds: a long list is slow to write."""

_HASHED_FILES, _HASHED_BYTES = 2_000, 1 << 30
"""Most files, and bytes in them, that count by content; further files count by size and time."""

MAPS_EVERY_S = 2.0
"""Interval between two checks of the files mapped into memory, seconds. A check takes some ms."""

_STOKER = Path(__file__).resolve().parents[1]
_NOT_THE_USERS = tuple(
    str(Path(place).resolve())
    for place in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        *(str(_STOKER), "/proc", "/sys", "/etc", "/run", "/var/run"),
    )
    if place
)
"""Folders of the system and of installed libraries, whose versions already count."""


def _is_within(path: str, folders: tuple[str, ...]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def _is_of_the_system(path: str) -> bool:
    """Whether a file outside the user's folder never counts: system files, devices, hidden files at home."""
    if path.startswith("/dev/"):
        return not path.startswith("/dev/shm/")  # noqa: S108 - data of users lies there
    return _is_within(path, _NOT_THE_USERS) or path.startswith(f"{Path.home()}{os.sep}.")


State = tuple[int, int]
"""Size and modification time (ns) of a file. The change time is not used, because a backup by hard
links changes it."""

Snapshot = Mapping[str, State]
"""Path relative to the folder -> state at the start of the run. A folder's name ends in `/`."""

_FOLDER, _LEFT_OUT = (0, 0), (-1, 0)
"""States of a folder: its files are in the snapshot, or are left out because there are too many."""


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
    """Names that the run has created, relative to the user's folder. They do not count in a listing.
    A name that ends in `/` is a folder for outputs of experiments; see `listing_mark`."""

    appeared: list[str] = field(default_factory=list)
    """Names that an unknown process has created during the run. They count only in the listing of a
    folder from which the run has read data."""

    def __bool__(self) -> bool:
        """Whether anything was read."""
        return bool(self.files or self.environment or self.listings)

    def and_also(self, others: Reads) -> Reads:
        """Combine two records. Of two marks for one name, this record's is kept."""
        return Reads(
            files=others.files | self.files,
            environment=others.environment | self.environment,
            listings=others.listings | self.listings,
            own=sorted({*self.own, *others.own}),
            appeared=sorted({*self.appeared, *others.appeared}),
        )

    def besides(self, others: Reads) -> Reads:
        """This record, with the names that other stages of the run have created."""
        both = self.and_also(others)
        return replace(self, own=both.own, appeared=both.appeared)

    def not_listed(self) -> frozenset[str]:
        """The names that do not count in a listing."""
        with_data = {parent_of(name) for name in self.files if not name.endswith(".py")}
        theirs = (name for name in self.appeared if parent_of(name) not in with_data)
        return frozenset((*self.own, *theirs))

    def as_identity(self) -> dict[str, dict[str, str]]:
        """The record as parts of an identity, without files and variables that are absent."""
        parts = {"file": self.files, "environment": self.environment, "folder": self.listings}
        return {
            part: {name: mark for name, mark in marks.items() if mark != ABSENT}
            for part, marks in parts.items()
        }

    def now(self, folder: Path) -> Reads:
        """The same files, variables and listings with their current marks."""
        own = self.not_listed()
        return replace(
            self,
            files={name: _mark_now(folder / name, mark) for name, mark in self.files.items()},
            environment={name: variable_mark(name) for name in self.environment},
            listings={name: listing_mark(folder, name, own=own) for name in self.listings},
        )


def _mark_now(path: Path, before: str) -> str:
    """The current mark of a file or link, of the same kind as its earlier mark."""
    if before.startswith(_LINK):
        return _link_mark(path)
    return mark_of(path, by_time=is_time_mark(before))


_LINK = "link:"
"""Start of a link's mark; the link's target follows."""


def _link_mark(path: Path) -> str:
    try:
        return f"{_LINK}{path.readlink()}"
    except OSError:
        return ABSENT


def mark_of(path: Path, *, by_time: bool = False) -> str:
    """The mark of a file's current content: a hash of its code for Python, else of its bytes.

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
"""Marks that this process has made: a command needs the mark of the same file several times."""

_SETTLED_S = 2.0
"""The mark of a file that changed less than so long ago is not reused, seconds: a second change can
have the same time."""


def _content_mark(path: Path) -> str:
    if path.suffix != ".py":
        return file_mark(path)
    try:
        return python_fingerprint(path)
    except RecursionError:
        return file_mark(path)


def variable_mark(name: str) -> str:
    """A hash of a variable's current value, or `ABSENT`."""
    value = os.environ.get(name)
    return ABSENT if value is None else hashlib.sha256(value.encode(errors="replace")).hexdigest()


def snapshot(folder: Path, *, outputs: Collection[Path] = ()) -> dict[str, State]:
    """The state of every file in a folder that the user's code may read. No file is opened.

    Folders beyond the limit of `MOST_FILES` are left out, and a log line names them.

    Args:
        folder: The user's folder.
        outputs: Folders that Stoker writes; they are left out.
    """
    found: dict[str, State] = {}
    for place in walk(folder, is_ignored=Ignored(folder), outputs=outputs):
        found[f"{place.name}/"] = _LEFT_OUT if place.left_out else _FOLDER
        for entry in place.files:
            state = _state(entry)
            if state is not None:
                found[within(place.name, entry.name)] = state
    left_out = [name for name, state in found.items() if state == _LEFT_OUT]
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
        "changes of the files in %s are not seen: at most %s files of the experiment's folder are "
        "observed. After a change train with --again, or list in .stokerignore what the code does not read",
        named,
        f"{MOST_FILES:,}",
    )


_NAMED = 3
"""Most folders that this line names."""


def _state(path: Path | os.DirEntry[str]) -> State | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_size, facts.st_mtime_ns


class Observer:
    """Records what is read from its creation on."""

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
            at_begin: `snapshot` of the folder at the start of the run.
            before: The reads of the run's earlier processes in the same stage.
            outputs: Folders that Stoker writes.
            followed: Python files that already count by their source.
            write: Stores all reads so far. Called in any thread when there are new ones.
        """
        self.folder = folder.resolve()
        self._ignored = Ignored(self.folder)
        self._at_begin, self._outputs = at_begin, tuple(path.resolve() for path in outputs)
        self._outputs += tuple(self._of_other_experiments())
        self._followed = frozenset(followed)
        self._write = write
        self._ignored_variable = ignored_variables(self.folder)
        self._ignored_outside = ignored_outside(self.folder)
        self._environment = dict(os.environ)
        self._lock = threading.RLock()
        self._files: dict[str, str] = dict(before.files)
        self._before = dict(before.environment)
        self._judged: set[str] = set(before.files)
        self._disowned: set[str] = set()
        self._hashed_bytes, self._looked_s = 0, 0.0
        self._listings = Listings(
            {name for name, state in at_begin.items() if tuple(state) != _LEFT_OUT},
            own=[*before.own, *self._of_outputs()],
            appeared=before.appeared,
            counted=before.listings,
        )
        self._links: dict[Path, dict[str, str]] = {}
        self.places = list(self._places())
        self._variables: dict[str, str] = {}
        self._by_line: dict[tuple[str, int], set[str]] = {}
        self._has_more, self._written_s = False, 0.0

    @property
    def reads(self) -> Reads:
        """All reads so far."""
        with self._lock:
            found = Reads(
                files=dict(self._files),
                environment=self._counted_variables(),
                own=self._listings.own,
                appeared=self._listings.appeared,
            )
            return replace(found, listings=self._listings.marks(own=found.not_listed()))

    def _of_outputs(self) -> Iterator[str]:
        """Stoker's outputs, and the folders above them, which the run may create."""
        for output in self._outputs:
            if output.is_relative_to(self.folder):
                name = output.relative_to(self.folder)
                yield from (each.as_posix() for each in (name, *name.parents) if each.name)
                yield f"{name.parent.as_posix()}/"

    def _of_other_experiments(self) -> Iterator[Path]:
        """Folders of other experiments' runs; and of their models next to this one's."""
        roots = {output.parent for output in self._outputs}
        for name in self._at_begin:
            path = self.folder / name
            if (
                name.endswith("/")
                and path != self.folder
                and self._ignored.holds_outputs(name, versions=path.parent in roots)
            ):
                yield path

    def _places(self) -> Iterator[Path]:
        """Folders in which reads count, and the links in them: inotify reports a link's target only."""
        for place in walk(self.folder, is_ignored=self._ignored, outputs=self._outputs):
            if not place.left_out:
                yield self.folder / place.name
            for each in place.files:
                if each.is_symlink():
                    path, name = Path(each.path), within(place.name, each.name)
                    target = Path(os.path.realpath(path))
                    self._links.setdefault(target, {})[name] = _link_mark(path)
                    if each.is_file():
                        yield path

    def _through_links(self, path: Path) -> None:
        """Record all links that lead to a file or folder, because the one that was used is unknown."""
        found = [self._links.get(target, {}) for target in (path, *path.parents)]
        for name, mark in (link for links in found for link in links.items()):
            if name not in self._judged:
                self._judged.add(name)
                self._files[name] = mark
                self._listings.read(name)
                self._has_more = True

    def write(self) -> None:
        """Store new reads, at most once in `WRITE_S`."""
        self.look_at_maps()
        if self._has_more and time.monotonic() - self._written_s >= WRITE_S:
            self.flush()

    def flush(self) -> None:
        """Store new reads now."""
        with self._lock:
            if self._has_more:
                self._write(self.reads)
                self._has_more, self._written_s = False, time.monotonic()

    def everything(self) -> None:
        """Record every file in the folder as read, because the actual reads are unknown."""
        for name in self._at_begin:
            if not name.endswith("/"):
                self.file(self.folder / name)

    def look_at_maps(self, *, now: bool = False) -> None:
        """Record files that are mapped into memory: reads of them give no event.

        Args:
            now: Check even if the last check was less than `MAPS_EVERY_S` ago.
        """
        if now or time.monotonic() - self._looked_s >= MAPS_EVERY_S:
            self._looked_s = time.monotonic()
            for path in _mapped(f"{self.folder}{os.sep}"):
                self.file(path)

    def listed(self, path: Path, *, by_user: bool) -> None:
        """Record that a folder was listed, by the user's code or by an unknown process."""
        with self._lock:
            name = self._name_of(path)
            if name is None or Path(name).is_absolute():
                return
            if by_user:
                self._has_more |= self._listings.listed(name)
                self._through_links(path)
            else:
                self._has_more |= self._listings.seen(name)

    def imports_from(self, path: Path) -> None:
        """Record that Python looks for modules in a folder."""
        if path.is_relative_to(self.folder):
            with self._lock:
                self._listings.imported(path.relative_to(self.folder).as_posix())

    def appeared(self, path: Path) -> None:
        """Record a file or folder that an unknown process has created below the user's folder."""
        if self._created(path, by_run=False) and _is_written_here(path):
            self._created(path, by_run=True)

    def made(self, path: Path) -> None:
        """Record a file, folder or link that this process creates, or renames to this name."""
        self._created(path, by_run=True)
        with self._lock:
            if path.is_relative_to(self.folder):
                self._disown(path.relative_to(self.folder).as_posix())

    def _created(self, path: Path, *, by_run: bool) -> bool:
        """Record a new name. True if it is recorded for the first time."""
        # Resolve the parent only: a new link counts by its own name, not by its target.
        path = path.parent.resolve() / path.name
        with self._lock:
            name = self._counted_name(path)
            if name is None or Path(name).is_absolute():
                return False
            new = self._listings.created(name, by_run=by_run)
            if new:
                # Store it at the next pause: if this process is killed before, the next one would
                # take the name for data that was added.
                self._has_more, self._written_s = True, -WRITE_S
            return new

    def written(self, path: Path) -> None:
        """Record a write: the file belongs to the run and does not count, even if it was read before."""
        with self._lock:
            name = self._name_of(path)
            if name is not None:
                self._created(path, by_run=True)
                self._disown(name)

    def _disown(self, name: str) -> None:
        self._judged.add(name)
        self._disowned.add(name)
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
        if mark is None:
            return
        with self._lock:
            # It may have been written while its mark was made: Keras's CSVLogger reads, then appends.
            if name not in self._disowned:
                self._files[name] = mark
                self._through_links(self.folder / name)
                self._listings.read(name)
                self._has_more = True

    def _name_of(self, path: Path) -> str | None:
        """The name under which a file is recorded, links resolved; None if it does not count."""
        return self._counted_name(path.resolve())

    def _counted_name(self, resolved: Path) -> str | None:
        if resolved in self._followed or any(resolved.is_relative_to(o) for o in self._outputs):
            return None
        if resolved.is_relative_to(self.folder):
            return None if self._ignored(resolved) else resolved.relative_to(self.folder).as_posix()
        if _is_of_the_system(str(resolved)) or self._ignored_outside(str(resolved)):
            return None
        return str(resolved)

    def _mark_at_begin(self, path: Path, name: str) -> str | None:
        """The file's mark at the start of the run; None for the run's own files and irregular ones."""
        if not Path(name).is_absolute():
            before, now = self._at_begin.get(name), _state(path)
            if before is None or now is None or tuple(before) != now:
                return None
        if not path.is_file():
            return None
        self._hashed_bytes += path.stat().st_size
        many = len(self._files) >= _HASHED_FILES or self._hashed_bytes > _HASHED_BYTES
        mark = mark_of(path, by_time=many)
        return None if mark == ABSENT else mark

    def variable(self, name: str, line: tuple[str, int]) -> None:
        """Record that a line of the user's code has read an environment variable."""
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
        """Whether a code file is the user's: in the folder, but not of an installed library."""
        return _is_within(file, (str(self.folder),)) and not _is_within(file, _NOT_THE_USERS)


def _python_of(path: Path) -> Path:
    """The source file of a compiled Python file; any other file unchanged."""
    if path.suffix != ".pyc":
        return path
    try:
        return Path(importlib.util.source_from_cache(str(path)))
    except ValueError:
        return path


def _mapped(below: str) -> Iterator[Path]:
    """Files that this process has mapped into memory, except shared writable mappings.

    Args:
        below: Start of the paths.

    Source: proc(5), /proc/pid/maps.
    """
    try:
        with _not_observed(), Path("/proc/self/maps").open(errors="surrogateescape") as maps:
            lines = [line.split(maxsplit=5) for line in maps if below in line]
    except OSError:
        return
    for _, mode, *_, path in lines:
        if path.startswith(below) and mode != "rw-s":
            yield Path(path.rstrip("\n"))


def _is_written_here(path: Path) -> bool:
    """Whether this process has a file open for writing; so a file created by C code is recognized.

    Source: proc(5), /proc/pid/fd and /proc/pid/fdinfo.
    """
    with _not_observed(), suppress(OSError):
        for opened in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if opened.readlink() == path:
                    facts = Path(f"/proc/self/fdinfo/{opened.name}").read_text().split()
                    flags = int(facts[facts.index("flags:") + 1], 8)
                    if flags & (os.O_WRONLY | os.O_RDWR):
                        return True
    return False


_ACTIVE: Observer | None = None
_OURS = threading.local()


@contextmanager
def _not_observed() -> Iterator[None]:
    """Exclude the observer's own reads while the body runs."""
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
        observer.look_at_maps(now=True)
        observer.flush()


def _watch(observer: Observer) -> FolderWatch | None:
    if is_available():
        try:
            return FolderWatch(
                observer.places,
                on_read=observer.file,
                on_list=functools.partial(observer.listed, by_user=False),
                on_create=observer.appeared,
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
    """Install the audit hook once in a process: Python cannot remove a hook."""
    global _HOOKED
    if not _HOOKED:
        _HOOKED = True
        sys.addaudithook(_audit)
        os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    """Stop observing in a forked child: it has no observer thread, and the lock may be held forever."""
    global _ACTIVE
    _ACTIVE = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    observer = _ACTIVE
    # At the end of the process all names here are None.
    if observer is None or event not in _EVENTS or getattr(_OURS, "reads", False):
        return
    path, flags = arguments[0], arguments[-1]
    if event in _CREATING:
        _makes(observer, *arguments[_CREATING[event]])
    elif event != "open":
        if path is None or isinstance(path, str | bytes | os.PathLike):
            _listed(observer, os.path.realpath(os.fsdecode(path or ".")))
    elif isinstance(path, str | bytes | os.PathLike):
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_APPEND)
        _opened(observer, os.path.realpath(os.fsdecode(path)), writes=bool(writes))


_CREATING = {
    # Event -> positions of the new name, and of its folder's descriptor if there is one.
    "os.mkdir": slice(0, 3, 2),
    "os.rename": slice(1, 4, 2),
    "os.link": slice(1, 4, 2),
    "os.symlink": slice(1, 3),
}
"""Python's audit events for new names. `open` can create one, too."""

_EVENTS = frozenset(("open", "os.listdir", "os.scandir", *_CREATING))
"""Python's audit events for reads, listings and new names."""


def _makes(observer: Observer, path: Any, folder: int) -> None:
    text = os.fsdecode(path)
    if folder >= 0:
        text = os.path.join(f"/proc/self/fd/{folder}", text)  # noqa: PTH118 - may be absolute
    parent, name = os.path.split(os.path.abspath(text))  # noqa: PTH100 - links stay
    full = os.path.join(os.path.realpath(parent), name)  # noqa: PTH118 - the same
    if _is_within(full, (str(observer.folder),)):
        observer.made(Path(full))


def _listed(observer: Observer, full: str) -> None:
    if not _is_within(full, (str(observer.folder),)):
        return
    if _IMPORTLIB in sys._getframe(2).f_code.co_filename:  # noqa: SLF001 - documented, and quick
        observer.imports_from(Path(full))
    elif _called_by_the_user(observer, ends=_IMPORTLIB):
        observer.listed(Path(full), by_user=True)


_IMPORTLIB = "importlib"
"""Part of the file names of Python's own import system."""


def _opened(observer: Observer, full: str, *, writes: bool) -> None:
    if writes and _is_within(full, (str(observer.folder),)):
        # Files that the run writes never count, even if a library opened them (a callback's log).
        observer.written(Path(full))
    elif not _is_of_the_system(full) and _called_by_the_user(observer):
        (observer.written if writes else observer.file)(Path(full))


def _called_by_the_user(observer: Observer, *, ends: str = "") -> bool:
    """Whether the user's code has caused an event.

    Args:
        observer: Knows the user's folder.
        ends: Part of a file name. Calls that come through such a file are not the user's.
    """
    frame = sys._getframe(3)  # noqa: SLF001 - documented, and the only quick way
    while frame is not None and not (ends and ends in frame.f_code.co_filename):
        if observer.is_of_the_user(frame.f_code.co_filename):
            return True
        if _is_within(frame.f_code.co_filename, (str(_STOKER),)):
            # Stoker's own read, even if the user's script has called Stoker.
            return False
        frame = frame.f_back  # type: ignore[assignment]  # None ends the loop
    return False


_BETWEEN = frozenset((os.__file__, "<frozen os>", "<frozen _collections_abc>"))
"""Files of the standard library between the user's line and `os.environ` on the stack."""


def _observe_environment() -> Any:
    """Observe reads through `os.environ`; return the method that was replaced."""
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
