"""The versions of one model: which one is served, and the change from one to the next."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from stoker.core.errors import DataError
from stoker.export.repository import MANIFEST, read_aliases, version_folders
from stoker.serve.batching.batcher import Batcher
from stoker.serve.errors import Code, ServeError
from stoker.serve.servable import LoadOptions, Servable, State

_log = logging.getLogger(__name__)

FileState = tuple[tuple[str, int, int], ...]
"""Name, size in bytes and time of change in ns of every file of a version."""


class ModelVersions:
    """Watches a base path, and serves the newest version in it that loads."""

    def __init__(self, name: str, base: Path, options: LoadOptions | None = None) -> None:
        """Args: name: the model's name; base: the folder of its versions; options: for loading."""
        self._options = options or LoadOptions()
        self.name = name
        self.base = base
        self._servables: dict[int, Servable] = {}
        self._seen: dict[int, FileState] = {}
        self._failed: dict[int, FileState] = {}
        self._current: Servable | None = None
        self._aliases: dict[str, int] = {}
        self._looks = 0
        self._lock = threading.Lock()

    @property
    def available(self) -> bool:
        """Whether a request for the newest version can be answered."""
        return self._current is not None

    @property
    def tried(self) -> bool:
        """Whether it had the two looks that a version of another writer needs to be loaded."""
        return self._looks >= 2

    def poll(self) -> None:
        """Look at the base path once; load what is new and whole, then unload what it replaces.

        The newest version that loads is served. A version that was tried is tried again only
        when its files have changed. With no version left on the disk the last one serves on.
        """
        folders = version_folders(self.base)
        self._read_aliases()
        seen = {version: file_state(path) for version, path in folders.items()}
        self._forget(seen)
        for version in sorted(folders, reverse=True):
            if self._serves(version):
                break
            if self._can_be_tried(version, seen[version]) and self._try(version, folders[version]):
                break
        self._seen = seen
        self._looks += 1

    def close(self) -> None:
        """Unload everything, after the requests under way."""
        self._make_current(None)

    def statuses(self, version: int | None = None) -> list[tuple[int, State, str]]:
        """Version, state and the reason of its end, newest first; all, or the one asked for."""
        with self._lock:
            found = [s for s in self._servables.values() if version in (None, s.version)]
        return [(s.version, s.state, s.reason) for s in sorted(found, key=lambda s: -s.version)]

    def version_of(self, label: str) -> int:
        """The version that a label names.

        Raises:
            ServeError: no version has this label.
        """
        version = self._aliases.get(label)
        if version is None:
            raise ServeError(Code.INVALID_ARGUMENT, f"Unrecognized servable version label: {label}")
        return version

    @contextlib.contextmanager
    def use(self, version: int | None = None) -> Iterator[tuple[int, Batcher]]:
        """Hold the newest version, or the one asked for, while a request is answered.

        Raises:
            ServeError: no such version is loaded.
        """
        with contextlib.ExitStack() as stack:
            while True:
                servable = self._current
                if servable is None or version not in (None, servable.version):
                    wanted = "Latest" if version is None else "Specific"
                    number = "" if version is None else f", {version}"
                    raise ServeError(
                        Code.NOT_FOUND,
                        f"Servable not found for request: {wanted}({self.name}{number})",
                    )
                model = stack.enter_context(servable.use())
                if model is not None:  # else it was replaced between the two lines: look again
                    break
            yield servable.version, model

    def _serves(self, version: int) -> bool:
        return self._current is not None and self._current.version == version

    def _can_be_tried(self, version: int, state: FileState) -> bool:
        """Whether the files are at rest, and are not those that failed before.

        A version with our manifest is whole the moment that it has its name, and is checked.
        One of another writer must look the same at two polls.
        """
        if self._failed.get(version) == state:
            return False
        names = {name for name, _, _ in state}
        at_rest = self._seen.get(version) == state
        started = bool(names & {"saved_model.pb", "saved_model.pbtxt"})
        return MANIFEST in names or (started and at_rest)

    def _try(self, version: int, path: Path) -> bool:
        before = file_state(path)
        servable = Servable(version, path, self._options)
        with self._lock:
            self._servables[version] = servable
        if not servable.load():
            self._failed[version] = before
            _log.error("%s version %d is not served: %s", self.name, version, servable.reason)
            return False
        self._failed.pop(version, None)
        _log.info("%s version %d is served", self.name, version)
        self._make_current(servable)
        return True

    def _make_current(self, servable: Servable | None) -> None:
        old, self._current = self._current, servable
        if old is not None:
            old.unload()

    def _forget(self, seen: dict[int, FileState]) -> None:
        """Drop the record of versions whose folders are gone, but not of the one that serves."""
        with self._lock:
            gone = [v for v in self._servables if v not in seen and not self._serves(v)]
            for version in gone:
                del self._servables[version]
        for version in self._failed.keys() - seen.keys():
            del self._failed[version]

    def _read_aliases(self) -> None:
        try:
            self._aliases = read_aliases(self.base)
        except DataError as error:
            _log.error("the labels of %s stay as they were: %s", self.name, error)


def file_state(folder: Path) -> FileState:
    """What tells, without reading them, that files have changed; empty for a folder that is gone."""
    found = []
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                relative = path.relative_to(folder).as_posix()
                found.append((relative, stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(found))
