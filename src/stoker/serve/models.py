"""All models of a server: found, watched each by its own thread, and looked up by name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from stoker.export.repository import Repository
from stoker.serve.errors import Code, ServeError
from stoker.serve.servable import LoadOptions
from stoker.serve.versions import ModelVersions

_log = logging.getLogger(__name__)


class Models:
    """The models by name; a thread per model, so that one that loads long holds up no other."""

    def __init__(
        self,
        *,
        poll_s: float,
        on_change: Callable[[], None] = lambda: None,
        options: LoadOptions | None = None,
    ) -> None:
        """Args: poll_s: seconds between looks; on_change: called after each; options: for loading."""
        self._options = options or LoadOptions()
        self._poll_s = poll_s
        self._on_change = on_change
        self._by_name: dict[str, ModelVersions] = {}
        self._named: set[str] = set()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()

    def watch(self, name: str, base: Path) -> None:
        """Serve one model that the user named: the server is not ready without it."""
        self._named.add(name)
        self._watch({name: base})

    def watch_root(self, root: Path) -> None:
        """Serve every model of a repository, those that come later too."""
        repository = Repository(root)

        def look() -> None:
            new = [name for name in repository.models() if name not in self._by_name]
            self._watch({name: repository.base(name) for name in new})

        self._start(look, name="stoker-models")

    def names(self) -> list[str]:
        """The names of all models, sorted."""
        return sorted(self._by_name)

    def get(self, name: str, version: int | None = None) -> ModelVersions:
        """The model of a name; the version is for the error's text only.

        Raises:
            ServeError: there is none.
        """
        model = self._by_name.get(name)
        if model is None:
            wanted = f"Latest({name})" if version is None else f"Specific({name}, {version})"
            raise ServeError(Code.NOT_FOUND, f"Servable not found for request: {wanted}")
        return model

    def waiting_for(self) -> list[str]:
        """The models that keep the server from being ready; "a model" where there is none at all.

        A model that the user named must be available. One that was found in a repository
        and cannot be loaded does not take the others out of service.
        """
        known = dict(self._by_name)
        waits = [
            name
            for name, model in known.items()
            if not model.available and (name in self._named or not model.tried)
        ]
        if not waits and not any(model.available for model in known.values()):
            return sorted(known) or ["a model"]
        return sorted(waits)

    def close(self) -> None:
        """Stop watching and unload all."""
        self._stop.set()
        for thread in list(self._threads):
            thread.join()
        for model in self._by_name.values():
            model.close()

    def _watch(self, bases: Mapping[str, Path]) -> None:
        """Know all before the first is looked at: with one loaded, the others are waited for."""
        new = {name: ModelVersions(name, base, self._options) for name, base in bases.items()}
        self._by_name = {**self._by_name, **new}  # replaced whole: readers hold no lock
        for name, model in new.items():
            self._start(model.poll, name=f"stoker-versions-{name}")

    def _start(self, look: Callable[[], None], *, name: str) -> None:
        thread = threading.Thread(target=self._run, args=(look,), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, look: Callable[[], None]) -> None:
        while not self._stop.is_set():
            try:
                look()
            except OSError as error:  # a lost mount: what is loaded serves on
                _log.error("the models cannot be looked for: %s", error)
            self._on_change()
            self._stop.wait(self._poll_s)
