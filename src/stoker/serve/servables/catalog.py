"""The models of a server: finds them, watches each in a thread of its own, and returns them by name."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from stoker.registry.repository import Repository
from stoker.serve.errors import Code, ServeError
from stoker.serve.routing import Served
from stoker.serve.servables.model_config import ModelConfig, RequestLogConfig
from stoker.serve.servables.servable import LoadOptions, State
from stoker.serve.servables.versions import ModelVersions

_log = logging.getLogger(__name__)


class Models:
    """The models of a server by name. Each has a thread of its own, so that a slow load does not delay other models."""

    def __init__(
        self,
        *,
        poll_s: float,
        on_change: Callable[[], None] = lambda: None,
        options: LoadOptions | None = None,
    ) -> None:
        """Create an empty catalog.

        Args:
            poll_s: Seconds between two checks of a model.
            on_change: Called after each check.
            options: How versions are loaded.
        """
        self._options = options or LoadOptions()
        self._poll_s = poll_s
        self._on_change = on_change
        self._by_name: dict[str, ModelVersions] = {}
        self._named: set[str] = set()
        self._root: Path | None = None
        self._watches: dict[str, Watch] = {}
        self._configuring = threading.Lock()
        self._reloading = threading.Lock()

    @property
    def root(self) -> Path | None:
        """The repository whose models are served; None if the models are named individually."""
        return self._root

    def watch_root(self, root: Path) -> None:
        """Serve every model of a repository, including those that are added later."""
        self._root = root
        repository = Repository(root)

        def look() -> None:
            new = [name for name in repository.models() if name not in self._by_name]
            self._add([ModelConfig(name=name, base=repository.base(name)) for name in new])

        self._watches["/"] = Watch(look, name="stoker-models", poll_s=self._poll_s)

    def configure(self, configs: Sequence[ModelConfig]) -> None:
        """Serve exactly these models. The server is ready only when all of them can be called.

        Models that are already served continue without interruption. A model that is no longer configured is unloaded
        after its last request.
        """
        with self._configuring:
            by_name = {config.name: config for config in configs}
            self._named = set(by_name)
            self._add([config for config in configs if config.name not in self._by_name])
            for name, model in list(self._by_name.items()):
                if name not in by_name:
                    self._remove(name)
                elif model.config != by_name[name]:
                    model.reconfigure(by_name[name])
                    self._watches[name].look_now()

    def reload(
        self, configs: Sequence[ModelConfig], *, allow_unavailable: bool, timeout_s: float
    ) -> None:
        """Like `configure`, but wait until all models can be called, and change labels only then.

        Args:
            configs: The models to serve.
            allow_unavailable: Whether a new label may name a version that is not loaded.
            timeout_s: Maximum wait, seconds.

        Raises:
            ServeError: a model cannot be called in time, or a label names a version that is not loaded. All other
                changes are made anyway, but labels do not change.
        """
        with self._reloading:
            labels = {name: dict(model.config.labels) for name, model in self._by_name.items()}
            self.configure([dataclasses.replace(c, labels=labels.get(c.name, {})) for c in configs])
            self._wait_until_tried(timeout_s)
            for config in configs:
                _check_labels(
                    self.get(config.name),
                    config,
                    labels.get(config.name, {}),
                    new=allow_unavailable,
                )
            self.configure(configs)

    def names(self) -> list[str]:
        """Return the names of all models, sorted."""
        return sorted(self._by_name)

    def get(self, name: str, version: int | None = None) -> ModelVersions:
        """Return the model with a name. The version is used only in the error message.

        Raises:
            ServeError: no model has this name.
        """
        model = self._by_name.get(name)
        if model is None:
            requested = f"Latest({name})" if version is None else f"Specific({name}, {version})"
            raise ServeError(Code.NOT_FOUND, f"Servable not found for request: {requested}")
        return model

    def waiting_for(self) -> list[str]:
        """Return the models because of which the server is not ready; "a model" if the server has no models.

        A model that the user named must be available. A model that was found in a repository need only have been tried,
        so a model that cannot be loaded does not take other models out of service.
        """
        known = dict(self._by_name)
        waits = [
            name
            for name, model in known.items()
            if not model.available and (name in self._named or not model.tried)
        ]
        if not waits and not self.can_answer():
            return sorted(known) or ["a model"]
        return sorted(waits)

    def available(self) -> dict[str, bool]:
        """Return model -> whether it can be called."""
        return {name: model.available for name, model in self._by_name.items()}

    def served(self) -> dict[str, Served]:
        """Return model -> its folder and load errors, for a router."""
        return {
            name: Served(
                base=model.config.base,
                failed={
                    version: reason
                    for version, state, reason in model.statuses()
                    if state is State.END and reason
                },
            )
            for name, model in list(self._by_name.items())
        }

    def folder_of(self, name: str, version: int) -> Path | None:
        """Return the folder of a version; None if the version cannot be called."""
        model = self._by_name.get(name)
        return None if model is None else model.folder_of(version)

    def loaded(self) -> dict[Sequence[str], float]:
        """Return (model, version) -> 1 if it can be called, 0 if it failed to load, for the metric `MODEL_LOADED`.

        A model gets an entry with version "" and value 0 while no version can be called and one is loading, or while
        its folder has no version.
        """
        return {
            (name, version): value
            for name, model in sorted(self._by_name.items())
            for version, value in _loaded_versions(model).items()
        }

    def request_log_of(self, name: str) -> RequestLogConfig | None:
        """Return the settings of a model's request log; None: no request log, or no such model."""
        model = self._by_name.get(name)
        return None if model is None else model.config.request_log

    def all_tried(self) -> bool:
        """Return whether there are models, and each was checked often enough for its versions to be loaded."""
        known = list(self._by_name.values())
        return bool(known) and all(model.tried for model in known)

    def can_answer(self) -> bool:
        """Return whether any model can be called."""
        return any(model.available for model in self._by_name.values())

    def close(self) -> None:
        """Stop watching, and unload all models."""
        for watch in list(self._watches.values()):
            watch.stop()
        for watch in list(self._watches.values()):
            watch.join()
        for model in self._by_name.values():
            model.close()

    def _add(self, configs: Sequence[ModelConfig]) -> None:
        """Add all models before the first check. So the first loaded model does not make the server ready too early."""
        new = {config.name: ModelVersions(config, self._options) for config in configs}
        self._by_name = {**self._by_name, **new}  # a new dictionary, because readers hold no lock
        for name, model in new.items():
            self._watches[name] = Watch(
                model.poll,
                name=f"stoker-versions-{name}",
                poll_s=self._poll_s,
                on_look=self._on_change,
            )

    def _remove(self, name: str) -> None:
        model = self._by_name[name]
        self._by_name = {known: m for known, m in self._by_name.items() if known != name}
        watch = self._watches.pop(name)
        watch.stop()
        watch.join()
        model.close()
        _log.info("%s is no longer served", name)

    def _wait_until_tried(self, timeout_s: float) -> None:
        end_s = time.monotonic() + timeout_s
        while waits := [n for n, m in self._by_name.items() if not m.tried]:
            for name in waits:
                self._watches[name].look_now()
            if time.monotonic() > end_s:
                break
            time.sleep(_LOOK_S)  # polls, because the checks run in the models' threads
        failed = [name for name, model in self._by_name.items() if not model.available]
        if failed:
            raise ServeError(Code.FAILED_PRECONDITION, self._failures_of(failed))

    def failed(self) -> str:
        """Return why configured models cannot become available with their current files; empty if they can.

        A model without versions has not failed, because a version may still appear.
        """
        failed = [
            name
            for name, model in self._by_name.items()
            if name in self._named
            and model.tried
            and not model.available
            and {state for _, state, _ in model.statuses()} == {State.END}
        ]
        return self._failures_of(failed) if failed else ""

    def _failures_of(self, failed: Sequence[str]) -> str:
        failures = [
            f"{{name: {name} version: {version}}} due to error: {reason or 'not loaded yet'}"
            for name in failed
            for version, _, reason in self._by_name[name].statuses() or _NOTHING
        ]
        return f"{len(failed)} servable(s) did not become available: {{{', '.join(failures)}}}"


def _loaded_versions(model: ModelVersions) -> dict[str, float]:
    statuses = model.statuses()
    found = {
        str(version): float(state is State.AVAILABLE)
        for version, state, reason in statuses
        if state is State.AVAILABLE or (state is State.END and reason)
    }
    loads = any(state in (State.START, State.LOADING) for _, state, _ in statuses)
    return found | ({"": 0.0} if not found or (loads and not any(found.values())) else {})


_NOTHING = [(0, State.START, "no version in its folder")]

_LOOK_S = 0.1
"""Time between two checks while a caller waits, seconds."""


class Watch:
    """A thread that repeats a check periodically."""

    def __init__(
        self,
        look: Callable[[], None],
        *,
        name: str,
        poll_s: float,
        on_look: Callable[[], None] = lambda: None,
    ) -> None:
        """Start the thread.

        Args:
            look: The check.
            name: The thread's name.
            poll_s: Seconds between two checks.
            on_look: Called after each check.
        """
        self._look, self._on_look, self._poll_s = look, on_look, poll_s
        self._stopped = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def look_now(self) -> None:
        """Start the next check now. Does not wait for it."""
        self._wake.set()

    def stop(self) -> None:
        """Stop after the current check."""
        self._stopped.set()
        self._wake.set()

    def join(self) -> None:
        """Wait until the thread has stopped."""
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.clear()
            try:
                self._look()
                self._on_look()
            except OSError as error:  # e.g. a lost mount: loaded models continue to serve
                _log.error("the search for models failed: %s", error)
            except Exception:  # noqa: BLE001 - one failure must not stop the checks
                _log.exception("the search for models failed")
            if not self._stopped.is_set():
                self._wake.wait(self._poll_s)


def _check_labels(
    model: ModelVersions, config: ModelConfig, before: dict[str, int], *, new: bool
) -> None:
    loaded = {version for version, state, _ in model.statuses() if state is State.AVAILABLE}
    for label, version in config.labels.items():
        if version in loaded or before.get(label) == version:
            continue
        if not new or label in before:
            raise ServeError(
                Code.FAILED_PRECONDITION,
                f"Request to assign label {label} to version {version} of model {config.name}, "
                "which is not currently available for inference",
            )
