"""The versions of one model: selects the versions that are served, and replaces old versions by new ones."""

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
"""For every file of a version: relative path, size in bytes, and modification time in nanoseconds."""

ENOUGH_LOOKS = 2
"""Number of checks after which a version that Stoker did not write is loaded; see `_can_be_tried`."""


class ModelVersions:
    """Watches a model's base path, and serves the versions in it that the policy selects and that can be loaded."""

    def __init__(self, config: ModelConfig, options: LoadOptions | None = None) -> None:
        """Args: config: the model's settings; options: how versions are loaded."""
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
        """Whether a request that names no version can be answered.

        A rollout may send it to any version of the rollout, so all of them must be loaded or tried.
        """
        wanted = self._rollout
        whole = wanted is None or self.tried or wanted <= self._available.keys()
        return bool(self._available) and whole

    @property
    def tried(self) -> bool:
        """Whether the base path was checked `ENOUGH_LOOKS` times."""
        return self._looks >= ENOUGH_LOOKS

    def reconfigure(self, config: ModelConfig) -> None:
        """Change base path, policy or labels. Versions are loaded and unloaded by the next check."""
        with self._polling:
            if config.base != self.config.base:
                self._seen, self._failed, self._aliases = {}, {}, {}
            self.config = config
            self._candidates = set(config.policy.candidates(version_folders(config.base)))
            self._looks = 0
            self._move_labels()

    def poll(self) -> None:
        """Check the base path once: load new and complete versions, then unload the versions that they replace.

        Of the versions that the policy selects, those with a label and the newest that can be loaded are served. A
        version that failed to load is tried again only when its files have changed. If no version is left on disk, the
        loaded versions continue to serve.
        """
        with self._polling:
            self._read_aliases()  # read before the folders, because a push writes the alias after the version
            folders = version_folders(self.config.base)
            candidates = self._wanted(folders)
            self._candidates = set(candidates)
            self._move_labels()
            seen = {version: file_state(path) for version, path in folders.items()}
            self._forget(seen)
            if self._options.unload_first:
                self._make_room(candidates, folders, seen)
            kept = self._chosen(candidates, lambda v: self._is_served(v, folders[v], seen[v]))
            if kept:  # also keep versions that a label names until its new version is loaded
                wanted = self._wanted_labels()
                kept |= {now for label, now in self._labels.items() if now != wanted.get(label)}
                # A rollout may send traffic back at any time, even to a version whose folder was deleted.
                kept |= (self._rollout or set()) & self._available.keys()
            if kept:
                self._unload([version for version in self._available if version not in kept])
            self._seen = seen
            self._looks += 1

    def serves(self, version: int) -> bool:
        """Return whether a version can be called."""
        return version in self._available

    def folder_of(self, version: int) -> Path | None:
        """Return the folder of a version; None if the version cannot be called."""
        servable = self._available.get(version)
        return None if servable is None else servable.path

    def close(self) -> None:
        """Unload all versions after their requests in progress."""
        with self._polling:
            self._unload(list(self._available))

    def statuses(self, version: int | None = None) -> list[tuple[int, State, str]]:
        """Return number, state and reason of failure of each version, newest first; only one version if it is given."""
        with self._lock:
            found = [s for s in self._servables.values() if version in (None, s.version)]
        return [(s.version, s.state, s.reason) for s in sorted(found, key=lambda s: -s.version)]

    def version_of(self, label: str) -> int:
        """Return the version that a label names.

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
        """Return the requested or the newest version. It stays loaded until `release` is called.

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
                # A label may just have moved from a version that was unloaded to another one.
                if label is None or number is None or number in missed:
                    raise self._not_found(wanted)
                missed.add(number)
                continue
            model = servable.hold()
            if model is not None:  # otherwise, the version was unloaded just now: try again
                return servable, model

    @contextlib.contextmanager
    def use(
        self, version: int | None = None, *, label: str | None = None
    ) -> Iterator[tuple[int, Batcher]]:
        """Keep the requested or the newest version loaded during the `with` block.

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
        """Return the versions that may be served.

        With a rollout, these are its versions, the baseline first. Without a rollout, they are the versions that the
        policy selects, newest first.
        """
        router = self._options.router
        self._rollout = None if router is None else router.wanted(self.name, self.config.base)
        if router is None or self._rollout is None:
            return self.config.policy.candidates(found)
        labeled = {*self._wanted_labels().values()}.difference(router.barred(self.name))
        route = router.route(self.name, no_headers)
        # Load the version first that answers while other versions are not loaded.
        first = None if route is None else route.otherwise
        wanted = self._rollout.union(labeled) & set(found)
        return sorted(wanted, key=lambda version: (version != first, -version))

    def _chosen(self, candidates: Sequence[int], serves: Callable[[int], bool]) -> set[int]:
        """Choose the versions to serve.

        These are the first candidates that can serve, up to the policy's number, and labeled versions.
        """
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
        """Unload versions that will not be needed, assuming that every version that can be tried now will load."""

        def may_serve(version: int) -> bool:
            current = self._available.get(version)
            is_there = current is not None and current.path == folders[version]
            return is_there or self._can_be_tried(version, seen[version])

        wanted = self._chosen(candidates, may_serve)
        if wanted:
            self._unload([version for version in self._available if version not in wanted])

    def _is_served(self, version: int, path: Path, state: FileState) -> bool:
        """Return whether a version can be called; load it first if it can be tried."""
        current = self._available.get(version)
        if current is not None and current.path == path:
            return True
        return self._can_be_tried(version, state) and self._try(version, path)

    def _can_be_tried(self, version: int, state: FileState) -> bool:
        """Return whether a version is complete, and its files differ from those that failed before.

        A version with Stoker's manifest is complete as soon as its folder has its name. A version that was not written
        by Stoker counts as complete when two checks in a row find the same files.
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
        # A new dictionary, because readers hold no lock.
        self._available = {**self._available, version: servable}
        self._move_labels()
        if replaced is not None:
            replaced.unload()
        return True

    def _show(self, servable: Servable) -> None:
        with self._lock:
            self._servables[servable.version] = servable

    def _unload(self, versions: list[int]) -> None:
        """Accept no more requests for these versions, and unload each after its last request."""
        gone = [self._available[version] for version in versions]
        self._available = {v: s for v, s in self._available.items() if v not in versions}
        self._move_labels()
        for servable in gone:
            servable.unload()

    def _forget(self, seen: Mapping[int, FileState]) -> None:
        """Forget versions whose folders are gone, except versions that still serve."""
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
            _log.error(
                "the labels of %s cannot be read, so they stay as they are: %s", self.name, error
            )

    def _move_labels(self) -> None:
        """Let every label name its configured version.

        While this version cannot be called, the label keeps its previous version, if that one can be called. So a label
        whose new version is loading, or cannot be loaded, still names a version that answers.
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
    """Return the state of all files in a folder, without reading them; empty for a missing folder."""
    found = []
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place, name)
            with contextlib.suppress(FileNotFoundError):
                stat = path.stat()
                relative = path.relative_to(folder).as_posix()
                found.append((relative, stat.st_size, stat.st_mtime_ns))
    return tuple(sorted(found))
