"""The versions of one model: which ones are served, and the transition from one to the next."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from stoker.core.errors import DataError
from stoker.export.litert import FILE as LITERT_FILE
from stoker.registry.repository import MANIFEST, read_aliases, version_folders
from stoker.serve.batching.batcher import Batcher
from stoker.serve.errors import Code, ServeError
from stoker.serve.routing import no_headers
from stoker.serve.servables.model_config import ModelConfig
from stoker.serve.servables.servable import LoadOptions, Servable, State

_log = logging.getLogger(__name__)

FileState = tuple[tuple[str, int, int], ...]
"""Name, size in bytes and modification time in ns of every file of a version."""

ENOUGH_LOOKS = 2
"""Number of checks after which a version of another writer is loaded, if it can be."""


class ModelVersions:
    """Watches a base path, and serves the versions in it that its policy selects and that can be loaded."""

    def __init__(self, config: ModelConfig, options: LoadOptions | None = None) -> None:
        """Args: config: its base path and policy; options: for loading."""
        self.name = config.name
        self.config = config
        self._options = options or LoadOptions()
        self._servables: dict[int, Servable] = {}
        self._seen: dict[int, FileState] = {}
        self._failed: dict[int, FileState] = {}
        self._available: dict[int, Servable] = {}
        self._aliases: dict[str, int] = {}
        self._labels: dict[str, int] = {}
        self._candidates: set[int] = set()
        self._rollout: set[int] | None = None
        self._looks = 0
        self._lock = threading.Lock()
        self._polling = threading.Lock()

    @property
    def available(self) -> bool:
        """Whether a request that names no version can be answered; a rollout may send it to any of its versions."""
        wanted = self._rollout
        whole = wanted is None or self.tried or wanted <= self._available.keys()
        return bool(self._available) and whole

    @property
    def tried(self) -> bool:
        """Whether it was checked as often as loading a version of another writer requires."""
        return self._looks >= ENOUGH_LOOKS

    def reconfigure(self, config: ModelConfig) -> None:
        """Apply another base path, policy or labels at the next check; nothing is unloaded now."""
        with self._polling:
            if config.base != self.config.base:
                self._seen, self._failed, self._aliases = {}, {}, {}
            self.config = config
            self._candidates = set(config.policy.candidates(version_folders(config.base)))
            self._looks = 0
            self._move_labels()

    def poll(self) -> None:
        """Check the base path once: load new and complete versions, then unload those that they replace.

        Of the versions that the policy selects, the newest that load are served, and those with a label. A
        version that was tried is tried again only when its files have changed. If the disk has no version left, what
        is loaded serves on.
        """
        with self._polling:
            self._read_aliases()  # before the folders: a push writes the version before its alias
            folders = version_folders(self.config.base)
            candidates = self._wanted(folders)
            self._candidates = set(candidates)
            self._move_labels()
            seen = {version: file_state(path) for version, path in folders.items()}
            self._forget(seen)
            if self._options.unload_first:
                self._make_room(candidates, folders, seen)
            kept = self._chosen(candidates, lambda v: self._is_served(v, folders[v], seen[v]))
            if kept:  # and versions that a label still names until its new one is loaded
                wanted = self._wanted_labels()
                kept |= {now for label, now in self._labels.items() if now != wanted.get(label)}
                # Traffic may go back at any time, also to a version whose folder was deleted.
                kept |= (self._rollout or set()) & self._available.keys()
            if kept:
                self._unload([version for version in self._available if version not in kept])
            self._seen = seen
            self._looks += 1

    def serves(self, version: int) -> bool:
        """Whether a version can be called."""
        return version in self._available

    def folder_of(self, version: int) -> Path | None:
        """The folder of a version that can be called; None if it cannot."""
        servable = self._available.get(version)
        return None if servable is None else servable.path

    def close(self) -> None:
        """Unload everything, after the requests in progress."""
        with self._polling:
            self._unload(list(self._available))

    def statuses(self, version: int | None = None) -> list[tuple[int, State, str]]:
        """Version, state and reason of its end, newest first; of all versions or of one."""
        with self._lock:
            found = [s for s in self._servables.values() if version in (None, s.version)]
        return [(s.version, s.state, s.reason) for s in sorted(found, key=lambda s: -s.version)]

    def version_of(self, label: str) -> int:
        """The version that a label names.

        Raises:
            ServeError: no version has this label.
        """
        version = self._labels.get(label)
        if version is None:
            raise ServeError(Code.INVALID_ARGUMENT, f"Unrecognized servable version label: {label}")
        return version

    def hold(
        self, version: int | None = None, *, label: str | None = None
    ) -> tuple[Servable, Batcher]:
        """Return the newest version, or the requested one; it stays loaded until its `release`.

        Raises:
            ServeError: no such version is loaded.
        """
        missed: set[int] = set()
        while True:
            available = self._available
            wanted = version if label is None else self.version_of(label)
            number = max(available, default=None) if wanted is None else wanted
            servable = None if number is None else available.get(number)
            if servable is None:
                # A label may just have moved to another version, because the old one is gone.
                if label is None or number is None or number in missed:
                    raise self._not_found(wanted)
                missed.add(number)
                continue
            model = servable.hold()
            if model is not None:  # otherwise it was replaced between the two lines: try again
                return servable, model

    @contextlib.contextmanager
    def use(
        self, version: int | None = None, *, label: str | None = None
    ) -> Iterator[tuple[int, Batcher]]:
        """Keep the newest version, or the requested one, loaded while a request is answered.

        Raises:
            ServeError: no such version is loaded.
        """
        servable, model = self.hold(version, label=label)
        try:
            yield servable.version, model
        finally:
            servable.release()

    def _not_found(self, version: int | None) -> ServeError:
        wanted = "Latest" if version is None else "Specific"
        number = "" if version is None else f", {version}"
        return ServeError(
            Code.NOT_FOUND, f"Servable not found for request: {wanted}({self.name}{number})"
        )

    def _wanted(self, found: Iterable[int]) -> list[int]:
        """The versions that may be served: those of the policy, newest first; or of a rollout, its baseline first."""
        router = self._options.router
        self._rollout = None if router is None else router.wanted(self.name, self.config.base)
        if router is None or self._rollout is None:
            return self.config.policy.candidates(found)
        labeled = {*self._wanted_labels().values()}.difference(router.barred(self.name))
        route = router.route(self.name, no_headers)
        # The version that answers for the others is loaded first.
        first = None if route is None else route.otherwise
        wanted = self._rollout.union(labeled) & set(found)
        return sorted(wanted, key=lambda version: (version != first, -version))

    def _chosen(self, candidates: Sequence[int], serves: Callable[[int], bool]) -> set[int]:
        """Of the candidates, newest first, the loaded ones up to the number of the policy, and the labeled ones."""
        labeled = set(self._wanted_labels().values())
        chosen: set[int] = set()
        counted = 0
        for version in candidates:
            met = self._rollout is None and self.config.policy.is_met(counted)
            if met and version not in labeled:
                continue
            if serves(version):
                chosen.add(version)
                counted += not met
        return chosen

    def _make_room(
        self,
        candidates: Sequence[int],
        folders: Mapping[int, Path],
        seen: Mapping[int, FileState],
    ) -> None:
        """Unload versions that are not needed if all that can be tried now load."""

        def may_serve(version: int) -> bool:
            current = self._available.get(version)
            is_there = current is not None and current.path == folders[version]
            return is_there or self._can_be_tried(version, seen[version])

        wanted = self._chosen(candidates, may_serve)
        if wanted:
            self._unload([version for version in self._available if version not in wanted])

    def _is_served(self, version: int, path: Path, state: FileState) -> bool:
        """Whether a version serves; loads it if that was not tried yet."""
        current = self._available.get(version)
        if current is not None and current.path == path:
            return True
        return self._can_be_tried(version, state) and self._try(version, path)

    def _can_be_tried(self, version: int, state: FileState) -> bool:
        """Whether the files no longer change, and differ from those that failed before.

        A version with our manifest is complete as soon as it has its name, and is checked.
        A version of another writer must be unchanged at two polls.
        """
        if self._failed.get(version) == state:
            return False
        names = {name for name, _, _ in state}
        at_rest = self._seen.get(version) == state
        models = {"saved_model.pb", "saved_model.pbtxt"}
        if self._options.litert_interpreters:
            models.add(LITERT_FILE)
        started = bool(names & models)
        return MANIFEST in names or (started and at_rest)

    def _try(self, version: int, path: Path) -> bool:
        before = file_state(path)
        servable = Servable(version, path, self._options, model_name=self.name)
        replaced = self._available.get(version)
        if replaced is None:
            self._show(servable)
        if not servable.load():
            self._failed[version] = before
            _log.error("%s version %d is not served: %s", self.name, version, servable.reason)
            return False
        self._failed.pop(version, None)
        _log.info("%s version %d is served", self.name, version)
        self._show(servable)
        self._available = {**self._available, version: servable}  # readers hold no lock
        self._move_labels()
        if replaced is not None:
            replaced.unload()
        return True

    def _show(self, servable: Servable) -> None:
        with self._lock:
            self._servables[servable.version] = servable

    def _unload(self, versions: list[int]) -> None:
        """Accept no more requests for these, then unload them after the last one."""
        gone = [self._available[version] for version in versions]
        self._available = {v: s for v, s in self._available.items() if v not in versions}
        self._move_labels()
        for servable in gone:
            servable.unload()

    def _forget(self, seen: Mapping[int, FileState]) -> None:
        """Drop the record of versions whose folders are gone, except those that serve."""
        with self._lock:
            for version in [v for v in self._servables if v not in seen]:
                if version not in self._available:
                    del self._servables[version]
        for version in self._failed.keys() - seen.keys():
            del self._failed[version]

    def _read_aliases(self) -> None:
        try:
            self._aliases = read_aliases(self.config.base)
        except DataError as error:
            _log.error("the labels of %s stay as they were: %s", self.name, error)

    def _move_labels(self) -> None:
        """Let every label name its version; while that one cannot be called, its previous version if that can.

        So a label that moves to a version that is loading, or that is broken, always names a version.
        """
        before, available = self._labels, self._available
        self._labels = {
            label: before[label]
            if version in self._candidates - available.keys() and before.get(label) in available
            else version
            for label, version in self._wanted_labels().items()
        }

    def _wanted_labels(self) -> dict[str, int]:
        return {**self._aliases, **self.config.labels}


def file_state(folder: Path) -> FileState:
    """A signature of the files that changes with them, without reading them; empty for a missing folder."""
    found = []
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                relative = path.relative_to(folder).as_posix()
                found.append((relative, stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(found))
