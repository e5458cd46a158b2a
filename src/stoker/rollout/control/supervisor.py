"""In the process that starts the workers: judges the rollouts, and rolls back a version that killed a worker.

This module does not import TensorFlow.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from stoker.core.errors import DataError, UserError
from stoker.rollout.control.controller import Controller, Event, change
from stoker.rollout.control.hooks import Hooks
from stoker.rollout.control.vetoes import Vetoes
from stoker.rollout.counts.counts import MEASURED
from stoker.rollout.counts.scrape import Scraper
from stoker.rollout.counts.spool import Spool
from stoker.rollout.gates.gates import VersionCounts
from stoker.rollout.state.changes import bar, roll_back
from stoker.rollout.state.files import Conflict, StateFiles, Stored
from stoker.rollout.state.state import FOLDER, Phase, RolloutState, state_of
from stoker.serve.routing import VersionInUse

_log = logging.getLogger(__name__)

_TRIES = 10
"""Number of attempts to make a change when other writers are first."""

MakeController = Callable[[str, Path], Controller]
"""Creates the controller of a model (name, folder of its rollout state)."""


def make_controller(model: str, folder: Path, *, gate_folder: Path | None = None) -> Controller:
    """Return a controller that calls the user's gates and webhooks.

    Args:
        model: Name of the model.
        folder: Folder of the model's rollout state.
        gate_folder: Folder with the modules of Python gates; None: no Python gates.
    """
    return Controller(folder, hooks=Hooks(model, folder, gate_folder=gate_folder))


class Controllers:
    """The controllers of all models that have a rollout."""

    def __init__(self, make: MakeController = make_controller) -> None:
        """Args: make: Creates the controller of a model."""
        self._make = make
        self._known: dict[Path, Controller] = {}
        self._said: dict[Path, str] = {}
        self._scraper = Scraper()

    def look(self, bases: Mapping[str, Path]) -> None:
        """Judge the rollouts, if no other server does.

        Args:
            bases: Model -> folder of its versions.
        """
        for model, base in bases.items():
            folder = base / FOLDER
            if folder not in self._known and not folder.is_dir():
                continue
            controller = self._known.setdefault(folder, self._make(model, folder))
            try:
                if controller.step() is not None:
                    self._scrape(model, folder)
                self._said.pop(folder, None)
            except (DataError, UserError, OSError) as error:
                if self._said.get(folder) != str(error):
                    _log.error("rollout of %s: %s", model, error)
                self._said[folder] = str(error)

    def _scrape(self, model: str, folder: Path) -> None:
        """Fetch the counts of servers that cannot write to the repository; the next `look` uses them."""
        stored = StateFiles(folder).latest()
        if stored is not None:
            state = state_of(stored.content["state"])
            if state.settings.servers:
                self._scraper.fetch(
                    folder, state.settings.servers, model=model, rollout=state.rollout
                )


class RolloutSupervisor:
    """Implements the protocol `Supervisor` for rollouts: one object for all workers of a server."""

    def __init__(self, *, server: str, make: MakeController = make_controller) -> None:
        """Create a supervisor; the first `look` reads the rollouts.

        Args:
            server: Name of this process, unique among all processes that serve the models.
            make: Creates the controller of a model.
        """
        self._server = server
        self._controllers = Controllers(make)
        self._bases: dict[str, Path] = {}
        self._workers: Path | None = None
        self._lost: dict[tuple[Path, int], dict[int, dict[int, VersionCounts]]] = {}
        self._changing = threading.Lock()

    def begin(self, folder: Path) -> None:
        """Args: folder: Folder that the workers share."""
        self._workers = folder

    def look(self, in_use: Sequence[VersionInUse]) -> None:
        """Judge the rollouts of all models that are or were loaded."""
        with self._changing:
            self._bases.update({each.model: each.base for each in in_use})
            self._controllers.look(self._bases)

    def worker_ended(self, in_use: Sequence[VersionInUse], *, how: str) -> bool:
        """Roll back the versions under rollout that were running or loading when a worker ended."""
        with self._changing:
            blamed = [self._blame(model, in_use, how) for model in {use.model for use in in_use}]
        return any(blamed)

    def _blame(self, model: str, in_use: Sequence[VersionInUse], how: str) -> bool:
        uses = {each.version: each for each in in_use if each.model == model}
        base = next(iter(uses.values())).base
        blamed = False
        for _ in range(_TRIES):
            stored = _stored(base)
            state = None if stored is None else state_of(stored.content["state"])
            if stored is None or state is None:
                return blamed
            use = next(
                (
                    each
                    for version, each in sorted(uses.items())
                    if version in state.on_trial and (each.requests or each.loading)
                ),
                None,
            )
            if use is None:
                return blamed
            lost = sum(each.requests for each in uses.values())
            why = f"it killed a worker ({how}), and {lost} requests with it"
            if use.loading and not use.requests:
                why = f"a worker ended ({how}) while it loaded this version"
            if not blamed:
                _log.error("%s version %d is rolled back: %s", model, use.version, why)
                # the disk is full: the rollback below may still succeed
                with contextlib.suppress(UserError, OSError):
                    Vetoes(self._workers).add(base, state.rollout, why=why)
                self._count_lost(use, state, lost, why)
            blamed = True
            with contextlib.suppress(Conflict):  # another writer was first: read the state again
                self._roll_back(base, stored, use.version, why)
                return True
        return blamed

    def _roll_back(self, base: Path, stored: Stored, version: int, why: str) -> None:
        now_s = time.time()
        state = bar(state_of(stored.content["state"]), [version])
        state = roll_back(state, reason=why, now_s=now_s)
        event = Event(what="roll back", who=self._server, why=why, at_s=now_s)
        try:
            change(StateFiles(base / FOLDER), stored, state, event)
        except (UserError, OSError) as error:
            # The veto keeps the version from this server's traffic.
            _log.error("the state of the rollout in %s cannot be changed: %s", base, error)

    def _count_lost(self, use: VersionInUse, state: RolloutState, lost: int, why: str) -> None:
        """Count the requests that were lost with the worker as bad answers of the version that killed it."""
        stage = MEASURED if state.phase is Phase.MEASURING else state.stage
        counts = self._lost.setdefault((use.base, state.rollout), {})
        counts.setdefault(stage, {}).setdefault(use.version, VersionCounts()).add(
            VersionCounts(requests=lost, bad=lost)
        )
        with contextlib.suppress(UserError, OSError):
            Spool(self._workers, use.base / FOLDER).write(
                counts,
                {use.version: why},
                rollout=state.rollout,
                server=f"{self._server}-parent",
            )


def _stored(base: Path) -> Stored | None:
    """Return the newest undamaged state of a model; None if the model has no state or the state cannot be read."""
    with contextlib.suppress(OSError):
        return StateFiles(base / FOLDER).latest_whole()
    return None
