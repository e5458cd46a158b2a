"""Inside a server: sends requests to the versions that the state says, and counts what they answer."""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import time
import zlib
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from stoker.core.errors import DataError, UserError
from stoker.rollout.answers import StageKeys, WaitingAnswers, one_answer
from stoker.rollout.controller import Controller
from stoker.rollout.counts import MEASURED, write_counts
from stoker.rollout.gates import VersionCounts
from stoker.rollout.split import TrafficSplit
from stoker.rollout.state import ACTIVE, Phase, RolloutState, state_of
from stoker.rollout.state_files import StateFiles, Stored
from stoker.serve.routing import AnsweredRun, Headers, Route, Served

_log = logging.getLogger(__name__)

FOLDER = ".rollout"
"""Name of the folder of a model's rollout, next to its versions."""


MOST_ROUTES = 10_000
"""Keys whose routes are kept: to make a route takes three times as long as to look it up."""


class RolloutRouter:
    """The rollouts of the models that a server serves. May be used by many threads."""

    def __init__(self, *, server: str, controls: bool = False) -> None:
        """Make a router that knows no rollout before `refresh`.

        Args:
            server: name of this process, of its own among all that serve the models.
            controls: whether it also judges the rollouts, if no other server does.
        """
        self._server, self._controls = server, controls
        self._rollouts: dict[str, _ModelRollout] = {}
        self._finding = threading.Lock()
        self.read_s = time.monotonic()
        """When all states were last read, by the monotonic clock."""

    def refresh(self, served: Mapping[str, Served]) -> None:
        """Read the states, and write what was counted: every second, by one thread."""
        whole = True
        for model, each in served.items():
            rollout = self._find(model, each.base)
            if rollout is None:
                continue
            whole &= rollout.read()
            with contextlib.suppress(OSError):  # read-only, or full: written at the next chance
                rollout.write(self._server, each.failed)
            if self._controls:
                whole &= rollout.control()
        if whole:
            self.read_s = time.monotonic()

    def _find(self, model: str, base: Path) -> _ModelRollout | None:
        """A model's rollout; reads its state if it was not known yet."""
        with self._finding:
            rollout = self._rollouts.get(model)
            if rollout is None and (base / FOLDER).is_dir():
                rollout = _ModelRollout(model, base / FOLDER)
                rollout.read()
                if not rollout.number:
                    return None
                self._rollouts[model] = rollout
            return rollout

    def route(self, model: str, headers: Headers) -> Route | None:
        """The version for a request that names none; None: the model has no rollout."""
        rollout = self._rollouts.get(model)
        return None if rollout is None else rollout.route(headers)

    def has_rollout(self, model: str) -> bool:
        """Whether a state decides for this model."""
        return model in self._rollouts

    def wanted(self, model: str, base: Path) -> set[int] | None:
        """The versions that must be loaded; None: the model has no rollout."""
        rollout = self._find(model, base)
        return None if rollout is None else rollout.wanted(time.time())

    def answered(
        self,
        model: str,
        route: Route,
        *,
        good: bool,
        took_s: float,
        outputs: Mapping[str, NDArray[Any]] | None,
    ) -> None:
        """Count an answer, as `Router` describes it."""
        rollout = self._rollouts.get(model)
        if rollout is not None and route.counts:
            rollout.count(one_answer(route, good=good, took_s=took_s, outputs=outputs))

    def answered_together(self, model: str, run: AnsweredRun) -> None:
        """Count answers of one run, as `Router` describes it."""
        rollout = self._rollouts.get(model)
        if rollout is not None:
            rollout.count(run)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Routing:
    """What one state says, ready to be asked."""

    state: RolloutState
    decide: Callable[[Headers], Route]
    """Gives the route of a request."""

    slow_s: float
    """Time above which an answer is slow in the sense of at least one gate, seconds."""

    @property
    def stage(self) -> int:
        return MEASURED if self.state.phase is Phase.MEASURING else self.state.stage


def _routing_of(state: RolloutState, model: str) -> _Routing:
    return _Routing(
        state=state,
        decide=_decision(state, state.split(model)),
        slow_s=min(state.slow_s.values(), default=math.inf),
    )


def _compared(state: RolloutState, split: TrafficSplit) -> tuple[int, ...]:
    """The versions whose latencies are compared; the baseline is measured as it will be compared."""
    if state.phase not in ACTIVE:
        return ()
    return (state.stable,) if state.phase is Phase.BAKING else tuple(split.weights)


def _decision(state: RolloutState, split: TrafficSplit) -> Callable[[Headers], Route]:
    """The function that routes by a state; all that does not depend on the request is done here, once."""
    is_active = state.phase in ACTIVE
    compared = _compared(state, split)

    def route_to(version: int, *, counts: bool = True, key: int | None = None) -> Route:
        return Route(
            version=version,
            otherwise=state.baseline,
            key=key,
            counts=counts,
            compared=compared,
        )

    if state.phase not in (Phase.RUNNING, Phase.PAUSED):
        stable = route_to(state.stable, counts=is_active)
        return lambda _: stable
    fixed = {version: route_to(version) for version in split.weights}
    if state.current.header:
        header = state.current.header.lower()
        with_header, without = fixed[state.candidate], fixed[state.baseline]
        return lambda headers: without if headers(header) is None else with_header
    if not state.settings.key:
        return split.at_random(fixed)
    name, without_key = state.settings.key.lower(), route_to(state.baseline, counts=False)
    cookie = state.settings.key.partition(":")[2].encode() if name.startswith("cookie:") else None
    version_of = split.by_crc({version: version for version in split.weights})
    known: dict[bytes, Route] = {}

    def by_key(headers: Headers) -> Route:
        key = headers(name) if cookie is None else _cookie(cookie, headers)
        if key is None:
            return without_key
        route = known.get(key)
        if route is None:
            crc = zlib.crc32(key)
            route = route_to(version_of(crc), key=crc | len(key) << 32)
            if len(known) >= MOST_ROUTES:
                known.clear()
            known[key] = route
        return route

    return by_key


class _ModelRollout:
    """The rollout of one model."""

    def __init__(self, model: str, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._files = StateFiles(folder)
        self._controller = Controller(folder)
        self._lock = threading.Lock()
        self._counts: dict[int, dict[int, VersionCounts]] = {}
        self._keys, self.waiting = StageKeys(), WaitingAnswers()
        self._failed: dict[int, str] = {}
        self._changed = False
        self._routing: _Routing | None = None
        self.route: Callable[[Headers], Route | None] = _no_route
        """Gives the route of a request."""

        self.number = 0
        """Of the state; 0 before there is one."""

    def read(self) -> bool:
        """Take up the newest state; a damaged one leaves the last one in force.

        Returns:
            Whether the newest could be read.
        """
        try:
            stored = self._files.latest()
        except (DataError, OSError) as error:
            _log.error("rollout of %s: %s", self._model, error)
            if not self.number:
                self._take_up(self._files.latest_whole())
            return False
        self._take_up(stored)
        return True

    def _take_up(self, stored: Stored | None) -> None:
        if stored is None or stored.number == self.number:
            return
        state, before = state_of(stored.content["state"]), self._routing
        routing = _routing_of(state, self._model)
        with self._lock:
            self._count_waiting()  # in the stage in which they were answered
            if before is None or state.rollout != before.state.rollout:
                self._counts, self._changed, self._failed = {}, False, {}
            if before is None or routing.stage != before.stage:
                self._keys = StageKeys()
            self._routing, self.number = routing, stored.number
            self.route = routing.decide

    def write(self, server: str, failed: Mapping[int, str]) -> None:
        with self._lock:
            self._count_waiting()
            self._changed |= dict(failed) != self._failed
            if self._routing is None or not self._changed:
                return
            rollout, self._changed, self._failed = self._routing.state.rollout, False, dict(failed)
            counts = deepcopy(self._counts)
        try:
            write_counts(self._folder, counts, failed, rollout=rollout, server=server)
        except OSError:
            self._changed = True
            raise

    def control(self) -> bool:
        """Judge the rollout if no other server does.

        Returns:
            Whether that was possible.
        """
        try:
            self._controller.step()
            return self.read()
        except (DataError, UserError, OSError) as error:
            _log.error("rollout of %s: %s", self._model, error)
            return False

    def wanted(self, now_s: float) -> set[int] | None:
        if self._routing is None:
            return None
        state = self._routing.state
        if state.phase in ACTIVE or now_s < state.began_s + state.settings.keep_previous_s:
            return {state.stable, state.baseline, state.candidate} - set(state.rejected)
        return {state.stable}

    def count(self, run: AnsweredRun) -> None:
        """Count answers, at the latest when `write` is called."""
        if self.waiting.add(run):
            with self._lock:
                self._count_waiting()

    def _count_waiting(self) -> None:
        """Count what waits in the stage that is in force; the lock is held."""
        if self._routing is None or self._routing.state.phase not in ACTIVE:
            self.waiting.clear()
        else:
            counts = self._counts.setdefault(self._routing.stage, {})
            self._changed |= self.waiting.count(counts, self._keys, slow_s=self._routing.slow_s)


def _no_route(_: Headers) -> None:
    """Before there is a state."""


def _cookie(name: bytes, headers: Headers) -> bytes | None:
    """The value of a cookie, None without it."""
    for part in (headers("cookie") or b"").split(b";"):
        given, _, value = part.partition(b"=")
        if given.strip() == name:
            return value.strip()
    return None
