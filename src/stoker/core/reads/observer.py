"""The observer: decides which events are reads by the user's code, and records these reads."""

from __future__ import annotations

import importlib.util
import os
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from stoker.core.folder_files import (
    Ignored,
    Listings,
    ignored_outside,
    ignored_variables,
    walk,
    within,
)
from stoker.core.reads.reads import (
    ABSENT,
    LEFT_OUT,
    Reads,
    Snapshot,
    link_mark,
    mark_of,
    state_of,
    variable_mark,
)

_SWEEP = 20
"""A line of code that reads more variables than this is assumed to copy the whole environment; these reads are not
recorded."""

WRITE_S = 0.5
"""Minimum time between two writes of the list of reads, seconds: a long list is slow to write."""

_HASHED_FILES, _HASHED_BYTES = 2_000, 1 << 30
"""Maximum number of files, and of their bytes, that are hashed; of further files, size and time are recorded."""

MAPS_EVERY_S = 2.0
"""Interval between two checks of the files mapped into memory, seconds. A check takes some ms."""

STOKER = Path(__file__).resolve().parents[2]
"""The folder of this package."""

_NOT_THE_USERS = tuple(
    str(Path(place).resolve())
    for place in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        *(str(STOKER), "/proc", "/sys", "/etc", "/run", "/var/run"),
    )
    if place
)
"""Folders of the system and of installed libraries. Their files are not inputs: versions of libraries are recorded
separately."""


def is_within(path: str, folders: tuple[str, ...]) -> bool:
    """Whether a path is one of the folders, or lies in one of them."""
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def is_of_the_system(path: str) -> bool:
    """Whether a file outside the user's folder is never an input: system files, devices, hidden files at home."""
    if path.startswith("/dev/"):
        return not path.startswith("/dev/shm/")  # noqa: S108 - it contains data of users
    return is_within(path, _NOT_THE_USERS) or path.startswith(f"{Path.home()}{os.sep}.")


class Observer:
    """Records all reads from the moment when the observer is created."""

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
            at_begin: The result of `snapshot` for the folder at the start of the run.
            before: The reads of the run's earlier processes in the same stage.
            outputs: Folders that Stoker writes.
            followed: Python files that need no record, because their source is already part of a fingerprint.
            write: Stores all reads so far. Called, in any thread, when there are new reads.
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
            {name for name, state in at_begin.items() if tuple(state) != LEFT_OUT},
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
        """Yield the names of Stoker's outputs, and of the folders above them, which the run may create."""
        for output in self._outputs:
            if output.is_relative_to(self.folder):
                name = output.relative_to(self.folder)
                yield from (each.as_posix() for each in (name, *name.parents) if each.name)
                yield f"{name.parent.as_posix()}/"

    def _of_other_experiments(self) -> Iterator[Path]:
        """Yield folders with runs of other experiments; next to this one's outputs, also with versions of models."""
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
        """Yield the folders to watch, and the links to files in them: inotify reports only the target of a link."""
        for place in walk(self.folder, is_ignored=self._ignored, outputs=self._outputs):
            if not place.left_out:
                yield self.folder / place.name
            for each in place.files:
                if each.is_symlink():
                    path, name = Path(each.path), within(place.name, each.name)
                    target = Path(os.path.realpath(path))
                    self._links.setdefault(target, {})[name] = link_mark(path)
                    if each.is_file():
                        yield path

    def _through_links(self, path: Path) -> None:
        """Record all links that lead to a file or folder, because it is unknown which link was used."""
        found = [self._links.get(target, {}) for target in (path, *path.parents)]
        for name, mark in (link for links in found for link in links.items()):
            if name not in self._judged:
                self._judged.add(name)
                self._files[name] = mark
                self._listings.read(name)
                self._has_more = True

    def write(self) -> None:
        """Store new reads, at most once per `WRITE_S` seconds."""
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
        """Record files that are mapped into memory: reading them causes no event.

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
        # Resolve only the parent: of a new link its own name is recorded, not that of its target.
        path = path.parent.resolve() / path.name
        with self._lock:
            name = self._counted_name(path)
            if name is None or Path(name).is_absolute():
                return False
            new = self._listings.created(name, by_run=by_run)
            if new:
                # Store the name at the next pause, even within `WRITE_S`: if this process is killed before that, the
                # next process takes the file for data that the user has added.
                self._has_more, self._written_s = True, -WRITE_S
            return new

    def written(self, path: Path) -> None:
        """Record a write: the file is now an output of the run and not an input, even if it was read before."""
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
        with not_observed():
            mark = self._mark_at_begin(path, name)
        if mark is None:
            return
        with self._lock:
            # The run may have written the file while its mark was computed: Keras's CSVLogger reads a file, then
            # appends to it.
            if name not in self._disowned:
                self._files[name] = mark
                self._through_links(self.folder / name)
                self._listings.read(name)
                self._has_more = True

    def _name_of(self, path: Path) -> str | None:
        """Return the name under which a file is recorded, with links resolved; None if the file cannot be an input."""
        return self._counted_name(path.resolve())

    def _counted_name(self, resolved: Path) -> str | None:
        if resolved in self._followed or any(resolved.is_relative_to(o) for o in self._outputs):
            return None
        if resolved.is_relative_to(self.folder):
            return None if self._ignored(resolved) else resolved.relative_to(self.folder).as_posix()
        if is_of_the_system(str(resolved)) or self._ignored_outside(str(resolved)):
            return None
        return str(resolved)

    def _mark_at_begin(self, path: Path, name: str) -> str | None:
        """Return the file's mark at the start of the run; None for the run's own files and irregular files."""
        if not Path(name).is_absolute():
            before, now = self._at_begin.get(name), state_of(path)
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
        """Whether a code file is the user's: it is in the user's folder, but not in an installed library there."""
        return is_within(file, (str(self.folder),)) and not is_within(file, _NOT_THE_USERS)


def _python_of(path: Path) -> Path:
    """Return the source file of a compiled Python file (.pyc); return any other path unchanged."""
    if path.suffix != ".pyc":
        return path
    try:
        return Path(importlib.util.source_from_cache(str(path)))
    except ValueError:
        return path


def _mapped(below: str) -> Iterator[Path]:
    """Yield the files that this process has mapped into memory, except shared writable mappings.

    Args:
        below: How the paths of the files must begin.

    Source: proc(5), /proc/pid/maps.
    """
    try:
        with not_observed(), Path("/proc/self/maps").open(errors="surrogateescape") as maps:
            lines = [line.split(maxsplit=5) for line in maps if below in line]
    except OSError:
        return
    for _, mode, *_, path in lines:
        if path.startswith(below) and mode != "rw-s":
            yield Path(path.rstrip("\n"))


def _is_written_here(path: Path) -> bool:
    """Whether this process has a file open for writing. This recognizes files that C code has created.

    Source: proc(5), /proc/pid/fd and /proc/pid/fdinfo.
    """
    with not_observed(), suppress(OSError):
        for opened in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                if opened.readlink() == path:
                    facts = Path(f"/proc/self/fdinfo/{opened.name}").read_text().split()
                    flags = int(facts[facts.index("flags:") + 1], 8)
                    if flags & (os.O_WRONLY | os.O_RDWR):
                        return True
    return False


_OURS = threading.local()


@contextmanager
def not_observed() -> Iterator[None]:
    """Do not observe this thread's reads while the body runs: they are the observer's own."""
    _OURS.reads = True
    try:
        yield
    finally:
        _OURS.reads = False


def is_not_observed() -> bool:
    """Whether this thread is inside of `not_observed`."""
    return getattr(_OURS, "reads", False)
