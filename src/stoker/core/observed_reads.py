"""Which files and environment variables the user's code reads, observed while it runs.

The source does not show it: a path can be computed, and NumPy, PyArrow, OpenCV, HDF5 and TensorFlow
read files in C. So reads are observed: below the user's folder with inotify (Linux), which sees
every reader; outside it with Python's audit hook, which sees files that Python itself opens; and
environment variables through `os.environ`. A read by another process below the folder counts too,
because inotify does not identify the reader.

A file counts with its content at the start of the run. A file that did not exist then, or was
written before it was read, belongs to the run and never counts. File times are not used for that
decision. A variable counts with its value, unless the code has set it itself. A folder below the
user's that is listed counts with the names in it (`listings`).
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

from stoker.core.code import python_fingerprint
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

_LOG = logging.getLogger(__name__)

ABSENT = "absent"
"""Mark of a variable that is not set, or of a missing file."""

_SWEEP = 20
"""If one line of code reads more variables than this, it copies the whole environment."""

WRITE_S = 0.5
"""Least time between two writes of the list of reads, seconds: a long list takes long to write."""

_HASHED_FILES, _HASHED_BYTES = 2_000, 1 << 30
"""Beyond so many files, or bytes in them (a folder of images), size and time count instead of content."""

MAPS_EVERY_S = 2.0
"""Interval between two looks at the files that are mapped into memory: a look takes some ms."""

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
"""File, relative to the folder -> its state at the start of the run; a folder's name ends in `/`."""

_FOLDER, _LEFT_OUT = (0, 0), (-1, 0)
"""States of a folder: its files are in the snapshot, or they are too many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reads:
    """What was read, with its state at the start of the run."""

    files: dict[str, str] = field(default_factory=dict)
    """File, relative to the folder or absolute -> mark of its content."""

    environment: dict[str, str] = field(default_factory=dict)
    """Variable -> hash of its value, or `ABSENT`; values can be secrets."""

    listings: dict[str, str] = field(default_factory=dict)
    """Folder that was listed, relative to the folder -> mark of the names in it."""

    own: list[str] = field(default_factory=list)
    """Names that the run has created, relative to the folder: they do not count in a listing."""

    appeared: list[str] = field(default_factory=list)
    """Names that this process or another one has created meanwhile: they count in the listing of a
    folder in which the run has read data."""

    def __bool__(self) -> bool:
        """Whether anything was read."""
        return bool(self.files or self.environment or self.listings)

    def and_also(self, others: Reads) -> Reads:
        """Both combined; the mark that was recorded first counts."""
        return Reads(
            files=others.files | self.files,
            environment=others.environment | self.environment,
            listings=others.listings | self.listings,
            own=sorted({*self.own, *others.own}),
            appeared=sorted({*self.appeared, *others.appeared}),
        )

    def besides(self, others: Reads) -> Reads:
        """The same, with the names that other stages of the run have created."""
        both = self.and_also(others)
        return replace(self, own=both.own, appeared=both.appeared)

    def not_listed(self) -> frozenset[str]:
        """Names that do not count in a listing."""
        with_data = {parent_of(name) for name in self.files if not name.endswith(".py")}
        theirs = (name for name in self.appeared if parent_of(name) not in with_data)
        return frozenset((*self.own, *theirs))

    def as_identity(self) -> dict[str, dict[str, str]]:
        """The same as parts of an identity: absent files and variables have no entry."""
        parts = {"file": self.files, "environment": self.environment, "folder": self.listings}
        return {
            part: {name: mark for name, mark in marks.items() if mark != ABSENT}
            for part, marks in parts.items()
        }

    def now(self, folder: Path) -> Reads:
        """The same files and variables with their current content."""
        own = self.not_listed()
        return replace(
            self,
            files={name: _mark_now(folder / name, mark) for name, mark in self.files.items()},
            environment={name: variable_mark(name) for name in self.environment},
            listings={name: listing_mark(folder, name, own=own) for name in self.listings},
        )


def _mark_now(path: Path, before: str) -> str:
    """The current mark of the kind that a file, or a link, had before."""
    if before.startswith(_LINK):
        return _link_mark(path)
    return mark_of(path, by_time=is_time_mark(before))


_LINK = "link:"
"""Start of the mark of a link: where it points to."""


def _link_mark(path: Path) -> str:
    try:
        return f"{_LINK}{path.readlink()}"
    except OSError:
        return ABSENT


def mark_of(path: Path, *, by_time: bool = False) -> str:
    """The mark of a file's current content: of Python its code, of other files their bytes.

    Args:
        path: The file.
        by_time: Use size and time instead, because the file is one of very many.
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
"""Marks that this process has made: a command asks several times for that of the same file."""

_SETTLED_S = 2.0
"""A file that was changed more recently could be changed again within the same tick of the clock."""


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
    """The state of every file in a folder that may be read; no file is opened.

    Folders beyond `MOST_FILES` files are left out, and named.

    Args:
        folder: The user's folder.
        outputs: Folders that Stoker writes.
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
    """Once in a process."""
    named = ", ".join(folders[:_NAMED]) + (
        f" and {more} more" if (more := len(folders) - _NAMED) > 0 else ""
    )
    _LOG.warning(
        "a change of the files in %s is not seen: of this folder at most %s files are observed. Train "
        "--again after a change, or name what is not the code's in .stokerignore",
        named,
        f"{MOST_FILES:,}",
    )


_NAMED = 3
"""Folders that the line names."""


def _state(path: Path | os.DirEntry[str]) -> State | None:
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
        """What was read so far."""
        with self._lock:
            found = Reads(
                files=dict(self._files),
                environment=self._counted_variables(),
                own=self._listings.own,
                appeared=self._listings.appeared,
            )
            return replace(found, listings=self._listings.marks(own=found.not_listed()))

    def _of_outputs(self) -> Iterator[str]:
        """Stoker's outputs and what is around them, for which the run may create a folder."""
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
        """Folders in which reads count, and links in them: a read is an event of the file behind one."""
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
        """Count the links that lead to a file or folder: which of them its reader took is not known."""
        found = [self._links.get(target, {}) for target in (path, *path.parents)]
        for name, mark in (link for links in found for link in links.items()):
            if name not in self._judged:
                self._judged.add(name)
                self._files[name] = mark
                self._listings.read(name)
                self._has_more = True

    def write(self) -> None:
        """Keep what was read since the last time, at most once in `WRITE_S`."""
        self.look_at_maps()
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
            if not name.endswith("/"):
                self.file(self.folder / name)

    def look_at_maps(self, *, now: bool = False) -> None:
        """Record files that are mapped into memory: reading them tells nobody until they are closed.

        Args:
            now: Also if the last look was not long ago.
        """
        if now or time.monotonic() - self._looked_s >= MAPS_EVERY_S:
            self._looked_s = time.monotonic()
            for path in _mapped(f"{self.folder}{os.sep}"):
                self.file(path)

    def listed(self, path: Path, *, by_user: bool) -> None:
        """Record that a folder was listed, by the user's code or by somebody."""
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
        """Record that a file or folder below the folder was created, by this process or another one."""
        if self._created(path, by_run=False) and _is_written_here(path):
            self._created(path, by_run=True)

    def made(self, path: Path) -> None:
        """Record that this process creates a file, folder or link, or renames one to this name."""
        self._created(path, by_run=True)
        with self._lock:
            if path.is_relative_to(self.folder):
                self._disown(path.relative_to(self.folder).as_posix())

    def _created(self, path: Path, *, by_run: bool) -> bool:
        """Record a new name; whether it is news."""
        # The folder's path, because a new link is no other name of what it leads to.
        path = path.parent.resolve() / path.name
        with self._lock:
            name = self._counted_name(path)
            if name is None or Path(name).is_absolute():
                return False
            new = self._listings.created(name, by_run=by_run)
            if new:
                # Soon: a process that is killed now would find a name that nobody knows.
                self._has_more, self._written_s = True, -WRITE_S
            return new

    def written(self, path: Path) -> None:
        """Record a write: the file belongs to the run and does not count, also if it was read before."""
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
        """The recorded name of a file, behind all links; None if it does not count."""
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
        """Its mark at the start of the run; None if it is the run's own, or not a regular file."""
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


def _mapped(below: str) -> Iterator[Path]:
    """Files that this process has mapped into memory, unless it can write them there.

    Args:
        below: Start of their paths.

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
    """Whether this process has a file open for writing, as a writer in C has that creates it.

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
    if event not in _EVENTS or observer is None or getattr(_OURS, "reads", False):
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
    # Where the name and the descriptor of its folder are among the arguments.
    "os.mkdir": slice(0, 3, 2),
    "os.rename": slice(1, 4, 2),
    "os.link": slice(1, 4, 2),
    "os.symlink": slice(1, 3),
}
"""Events of Python that create a name; `open` does, too."""

_EVENTS = frozenset(("open", "os.listdir", "os.scandir", *_CREATING))
"""Events of Python that say what is read, or created."""


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
"""Part of the names of the files by which Python looks for modules and packages."""


def _opened(observer: Observer, full: str, *, writes: bool) -> None:
    if writes and _is_within(full, (str(observer.folder),)):
        # A callback's log: what the run writes does not count, even if Keras opened it.
        observer.written(Path(full))
    elif not _is_of_the_system(full) and _called_by_the_user(observer):
        (observer.written if writes else observer.file)(Path(full))


def _called_by_the_user(observer: Observer, *, ends: str = "") -> bool:
    """Whether the user's code is behind an event.

    Args:
        observer: Knows the user's folder.
        ends: Part of the name of a file; what it calls is not called by the user.
    """
    frame = sys._getframe(3)  # noqa: SLF001 - documented, and the only quick way
    while frame is not None and not (ends and ends in frame.f_code.co_filename):
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
