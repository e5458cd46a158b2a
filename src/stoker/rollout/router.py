"""Inside a server: sends requests to the versions that the state says, and counts what they answer."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
import zlib
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import DataError, UserError
from stoker.rollout.controller import Controller
from stoker.rollout.counts import MEASURED, write_counts
from stoker.rollout.gates import VersionCounts
from stoker.rollout.histogram import buckets_of
from stoker.rollout.prediction_shift import predicted
from stoker.rollout.shadow_stage import ShadowOptions, ShadowStage
from stoker.rollout.split import TrafficSplit
from stoker.rollout.state import ACTIVE, Phase, RolloutState, state_of
from stoker.rollout.state_files import StateFiles, Stored
from stoker.serve.routing import CopyResult, Headers, RequestCopy, Route, Served

_log = logging.getLogger(__name__)

FOLDER = ".rollout"
"""Name of the folder of a model's rollout, next to its versions."""

MOST_KEYS = 1_000_000
"""Keys of a stage that are remembered, so that each counts once; further ones are not counted."""


class RolloutRouter:
    """The rollouts of the models that a server serves. May be used by many threads."""

    def __init__(
        self,
        *,
        server: str,
        controls: bool = False,
        shadow: ShadowOptions | None = None,
    ) -> None:
        """Make a router that knows no rollout before `refresh`.

        Args:
            server: name of this process, of its own among all that serve the models.
            controls: whether it also judges the rollouts, if no other server does.
            shadow: how versions run in shadow; None: by the defaults.
        """
        self._shadow = shadow or ShadowOptions()
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
                rollout = _ModelRollout(model, base / FOLDER, self._shadow)
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
            rollout.count(route, good=good, took_s=took_s, outputs=outputs)

    def copy(self, model: str, route: Route, request: RequestCopy) -> None:
        """Have the candidate answer a request in shadow, as `Router` describes it."""
        rollout = self._rollouts.get(model)
        if rollout is None:
            request.on_result(CopyResult(version=route.version, is_compared=False))
        else:
            rollout.copy(route, request)


@dataclass(slots=True)
class _StageKeys:
    """The keys that have counted in a stage; each counts once for each gate."""

    bad: set[int] = field(default_factory=set)
    slow: set[int] = field(default_factory=set)
    predicted: set[int] = field(default_factory=set)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Routing:
    """What one state says, ready to be asked."""

    state: RolloutState
    split: TrafficSplit

    copied: float = 0.0
    """Share of the requests that are copied to the candidate."""

    @property
    def stage(self) -> int:
        return MEASURED if self.state.phase is Phase.MEASURING else self.state.stage

    def route(self, headers: Headers) -> Route:
        state = self.state
        if state.phase not in (Phase.RUNNING, Phase.PAUSED):
            return Route(
                version=state.stable, otherwise=state.baseline, counts=state.phase in ACTIVE
            )
        if self.copied:
            return self._shadow_route(headers)
        if state.current.header:
            chosen = headers(state.current.header.lower()) is not None
            version = state.candidate if chosen else state.baseline
            return Route(version=version, otherwise=state.baseline)
        if not state.settings.key:
            return Route(version=self.split.any_version(), otherwise=state.baseline)
        key = _key(state.settings.key, headers)
        if key is None:
            return Route(version=state.baseline, otherwise=state.baseline, counts=False)
        return Route(
            version=self.split.version_of(key),
            otherwise=state.baseline,
            key=_number_of(key),
        )

    def _shadow_route(self, headers: Headers) -> Route:
        """The baseline; its answers count only where the candidate answers the same request."""
        key = _key(self.state.settings.key, headers) if self.state.settings.key else b""
        return Route(
            version=self.state.baseline,
            otherwise=self.state.baseline,
            key=_number_of(key) if key else None,
            counts=False,
            copied=key is not None and random.random() < self.copied,  # noqa: S311 - a sample
        )


class _ModelRollout:
    """The rollout of one model."""

    def __init__(self, model: str, folder: Path, shadow: ShadowOptions) -> None:
        self._model, self._folder = model, folder
        self._shadow_options = shadow
        self._shadow: ShadowStage | None = None
        self._files = StateFiles(folder)
        self._controller = Controller(folder)
        self._lock = threading.Lock()
        self._counts: dict[int, dict[int, VersionCounts]] = {}
        self._keys = _StageKeys()
        self._failed: dict[int, str] = {}
        self._changed = False
        self._routing: _Routing | None = None
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
        copied = state.current.shadow if state.phase in (Phase.RUNNING, Phase.PAUSED) else 0.0
        routing = _Routing(state=state, split=state.split(self._model), copied=copied)
        with self._lock:
            self._end_shadow(routing)
            if before is None or state.rollout != before.state.rollout:
                self._counts, self._changed, self._failed = {}, False, {}
            if before is None or routing.stage != before.stage:
                self._keys = _StageKeys()
            self._routing, self.number = routing, stored.number

    def _end_shadow(self, routing: _Routing) -> None:
        """End a shadow stage that is over; the lock is held."""
        shadow, now = self._shadow, routing.state
        if shadow is not None and not (routing.copied and shadow.is_of(now)):
            shadow.close()
            self._shadow = None

    def copy(self, route: Route, request: RequestCopy) -> None:
        with self._lock:
            routing, shadow = self._routing, self._shadow
            if shadow is None and routing is not None and routing.copied:
                # Only now: a process that answers no requests needs no other that runs the candidate.
                shadow = self._shadow = ShadowStage(
                    self._model,
                    self._folder.parent,
                    routing.state,
                    self._counts.setdefault(routing.stage, {}),
                    self._lock,
                    self._shadow_options,
                )
            self._changed = True
        if shadow is None:
            request.on_result(CopyResult(version=route.version, is_compared=False))
        else:
            shadow.offer(route, request)

    def write(self, server: str, failed: Mapping[int, str]) -> None:
        with self._lock:
            failed = self._all_failed(failed)
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

    def _all_failed(self, failed: Mapping[int, str]) -> dict[int, str]:
        """Version -> why it cannot stay under rollout; the lock is held."""
        unloaded = {version: f"it cannot be loaded: {why}" for version, why in failed.items()}
        if self._shadow is None:
            return unloaded
        self._changed = True  # copies are compared after their requests have ended
        return {**unloaded, **self._shadow.failed}

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
        if state.phase in (Phase.MEASURING, Phase.RUNNING, Phase.PAUSED) and state.current.shadow:
            return {state.baseline}  # the candidate runs in a process of its own
        if state.phase in ACTIVE or now_s < state.began_s + state.settings.keep_previous_s:
            return {state.stable, state.baseline, state.candidate} - set(state.rejected)
        return {state.stable}

    def route(self, headers: Headers) -> Route | None:
        return None if self._routing is None else self._routing.route(headers)

    def count(
        self, route: Route, *, good: bool, took_s: float, outputs: Mapping[str, NDArray[Any]] | None
    ) -> None:
        values = None if outputs is None else predicted(outputs)
        good = good and (values is None or bool(np.isfinite(values).all()))
        with self._lock:
            if self._routing is None or self._routing.state.phase not in ACTIVE:
                return
            versions = self._counts.setdefault(self._routing.stage, {})
            counts = versions.setdefault(route.version, VersionCounts())
            counts.requests += 1
            self._changed = True
            if not good:
                counts.bad += self._is_first(route.key, self._keys.bad)
                return
            slow_s = min(self._routing.state.slow_s.values(), default=math.inf)
            # A client that is slow each time is one slow client.
            if took_s <= slow_s or self._is_first(route.key, self._keys.slow):
                counts.latency.update(buckets_of(np.array([took_s])).tolist())
            if values is not None and self._is_first(route.key, self._keys.predicted):
                counts.predictions.update(buckets_of(values).tolist())

    @staticmethod
    def _is_first(key: int | None, seen: set[int]) -> bool:
        if key is None:
            return True
        if key in seen or len(seen) >= MOST_KEYS:
            return False
        seen.add(key)
        return True


def _number_of(key: bytes) -> int:
    return zlib.crc32(key) | len(key) << 32


def _key(name: str, headers: Headers) -> bytes | None:
    """The value of a header, or of a cookie if the name is `cookie:NAME`."""
    kind, _, cookie = name.partition(":")
    if kind != "cookie":
        return headers(name.lower())
    for part in (headers("cookie") or b"").split(b";"):
        given, _, value = part.partition(b"=")
        if given.strip() == cookie.encode():
            return value.strip()
    return None
