"""In a server: routes requests to versions according to the rollout states, and counts the answers."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from stoker.rollout.control.supervisor import Controllers
from stoker.rollout.routing.answers import one_request
from stoker.rollout.routing.model_rollout import ModelRollout
from stoker.rollout.shadow.stage import ShadowOptions
from stoker.rollout.state.state import FOLDER
from stoker.serve.errors import Code, ServeError
from stoker.serve.routing import (
    CopyResult,
    Decide,
    Headers,
    Outputs,
    RequestCopy,
    Route,
    RunningRequest,
    Served,
    no_requests,
)

MAX_RUN_S = 10.0
"""Maximum time of a run of a version in a rollout, seconds; `--max-run-s` applies to other versions."""


class RolloutRouter:
    """Implements the protocol `Router` with the rollouts of a server's models. Thread-safe."""

    def __init__(
        self,
        *,
        server: str,
        folder: Path | None = None,
        controllers: Controllers | None = None,
        shadow: ShadowOptions | None = None,
    ) -> None:
        """Create a router; `refresh` reads the states.

        Args:
            server: Name of this process, unique among all processes that serve the models.
            folder: Folder that this server's workers share, with vetoes; None: the server has a single process.
            controllers: Judge the rollouts if no other server does; None: another process judges them.
            shadow: How versions run in shadow; None: the defaults.
        """
        self._server, self._controllers, self._workers = server, controllers, folder
        self._shadow = shadow or ShadowOptions()
        self._rollouts: dict[str, ModelRollout] = {}
        self.routes: dict[str, Decide] = {}
        """Model -> its routing decision, as `Router` describes it."""

        self._finding = threading.Lock()

    def refresh(
        self,
        served: Mapping[str, Served],
        running: Callable[[], Iterable[RunningRequest]] = no_requests,
    ) -> dict[str, float]:
        """Read the states, and write the counts; one thread calls this every second."""
        for model, each in served.items():
            rollout = self._find(model, each.base)
            if rollout is not None:
                rollout.read()
                self.routes[model] = rollout.route
                rollout.write(self._server, each.failed, running)
        if self._controllers is not None:
            self._controllers.look({model: each.base for model, each in served.items()})
        return {model: rollout.read_s for model, rollout in list(self._rollouts.items())}

    def max_run_s(self, model: str, version: int, *, loading: bool = False) -> float:
        """Return the maximum time of a version's run or load, seconds; infinity if the version is not in a rollout."""
        rollout = self._rollouts.get(model)
        if rollout is None or not rollout.judges(version):
            return math.inf
        return rollout.load_limit_s if loading else MAX_RUN_S

    def counts(self, model: str) -> Mapping[str, Any] | None:
        """Return the counts of this server's processes that could not be written next to the state."""
        rollout = self._rollouts.get(model)
        return None if rollout is None else rollout.unwritten()

    def hung(self, model: str, version: int, *, loading: bool = False) -> None:
        """Request the rollback of a version, if it is in a rollout, because its load or a run of it does not end."""
        rollout = self._rollouts.get(model)
        if rollout is not None and rollout.judges(version):
            rollout.blame(version, f"{'its load' if loading else 'a run of it'} does not end")

    def _find(self, model: str, base: Path) -> ModelRollout | None:
        """Return a model's rollout; read its state if no state has been read yet."""
        with self._finding:
            rollout = self._rollouts.get(model)
            if rollout is None and (base / FOLDER).is_dir():
                rollout = ModelRollout(
                    model, base / FOLDER, self._workers, server=self._server, shadow=self._shadow
                )
                rollout.read()
                if not rollout.is_known:
                    return None
                self._rollouts[model], self.routes[model] = rollout, rollout.route
            return rollout

    def route(self, model: str, headers: Headers) -> Route | None:
        """Return the route of a request that names no version; None: the model has no rollout."""
        decide = self.routes.get(model)
        return None if decide is None else decide(headers)

    def add_outcomes(self, model: str, outcomes: Sequence[tuple[str, float]]) -> None:
        """Record outcomes, as `Router` describes it."""
        rollout = self._rollouts.get(model)
        if rollout is None:
            raise ServeError(Code.NOT_FOUND, f"{model!r} has no A/B test under way")
        rollout.test.add_outcomes(model, outcomes)

    def wanted(self, model: str, base: Path) -> set[int] | None:
        """Return the versions that must be loaded; None: the model has no rollout."""
        rollout = self._find(model, base)
        return None if rollout is None else rollout.wanted(time.time())

    def barred(self, model: str) -> Collection[int]:
        """The versions that must not be loaded, even if a label names them."""
        rollout = self._rollouts.get(model)
        return () if rollout is None else rollout.barred

    def answered(
        self,
        model: str,
        route: Route,
        *,
        good: bool,
        took_s: float,
        outputs: Outputs | None,
    ) -> None:
        """Count an answer, as `Router` describes it."""
        rollout = self._rollouts.get(model)
        if rollout is not None and route.counts:
            rollout.count(one_request(route, good=good), outputs or {}, took_s)

    def copy(self, model: str, route: Route, request: RequestCopy) -> None:
        """Send a copy of a request to the candidate in shadow, as `Router` describes it."""
        rollout = self._rollouts.get(model)
        if rollout is None:
            request.on_result(CopyResult(version=route.version, is_compared=False))
        else:
            rollout.copy(route, request)
