"""Inside a server: sends requests to the versions that the state says, and counts what they answer."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from stoker.core.errors import DataError, UserError
from stoker.rollout.ab.logs import ABTestLogs
from stoker.rollout.control.supervisor import Controllers
from stoker.rollout.control.vetoes import Vetoes
from stoker.rollout.counts.counts import MEASURED
from stoker.rollout.counts.spool import Spool
from stoker.rollout.gates.gates import VersionCounts
from stoker.rollout.routing.answers import StageKeys, WaitingAnswers, one_answer
from stoker.rollout.routing.running import count_slow_running
from stoker.rollout.shadow.stage import ShadowOptions, ShadowStage
from stoker.rollout.split import TrafficSplit
from stoker.rollout.state.files import StateFiles, Stored
from stoker.rollout.state.state import ACTIVE, FOLDER, Phase, RolloutState, roll_back, state_of
from stoker.serve.errors import Code, ServeError
from stoker.serve.routing import (
    AnsweredRun,
    CopyResult,
    Headers,
    RequestCopy,
    Route,
    RunningRequest,
    Served,
    no_requests,
)

_log = logging.getLogger(__name__)

MOST_ROUTES = 10_000
"""Keys whose routes are kept: to make a route takes three times as long as to look it up."""

MAX_RUN_S = 10.0
"""Longest run of a version under rollout, seconds; `--max-run-s` holds for all others."""

UNREADABLE_S = 30.0
"""A state that cannot be read for this long is an error in the log, seconds."""


class RolloutRouter:
    """The rollouts of the models that a server serves. May be used by many threads."""

    def __init__(
        self,
        *,
        server: str,
        folder: Path | None = None,
        controllers: Controllers | None = None,
        shadow: ShadowOptions | None = None,
    ) -> None:
        """Make a router that knows no rollout before `refresh`.

        Args:
            server: name of this process, of its own among all that serve the models.
            folder: of the workers of this server, with vetoes; None: it has none.
            controllers: judge the rollouts, if no other server does; None: another process does.
            shadow: how versions run in shadow; None: by the defaults.
        """
        self._server, self._controllers, self._workers = server, controllers, folder
        self._shadow = shadow or ShadowOptions()
        self._rollouts: dict[str, _ModelRollout] = {}
        self._finding = threading.Lock()

    def refresh(
        self,
        served: Mapping[str, Served],
        running: Callable[[], Iterable[RunningRequest]] = no_requests,
    ) -> dict[str, float]:
        """Read the states, and write what was counted: every second, by one thread."""
        for model, each in served.items():
            rollout = self._find(model, each.base)
            if rollout is not None:
                rollout.read()
                rollout.write(self._server, each.failed, running)
        if self._controllers is not None:
            self._controllers.look({model: each.base for model, each in served.items()})
        return {model: rollout.read_s for model, rollout in list(self._rollouts.items())}

    def max_run_s(self, model: str, version: int) -> float:
        """The longest run of a version, seconds: shorter for one under rollout."""
        rollout = self._rollouts.get(model)
        judged = rollout is not None and rollout.judges(version)
        return MAX_RUN_S if judged else math.inf

    def counts(self, model: str) -> Mapping[str, Any] | None:
        """What the processes of this server counted and could not write next to the state."""
        rollout = self._rollouts.get(model)
        return None if rollout is None else rollout.unwritten()

    def hung(self, model: str, version: int) -> None:
        """Roll back a version under rollout whose run does not end."""
        rollout = self._rollouts.get(model)
        if rollout is not None and rollout.judges(version):
            rollout.blame(version, "a run of it does not end")

    def _find(self, model: str, base: Path) -> _ModelRollout | None:
        """A model's rollout; reads its state if it was not known yet."""
        with self._finding:
            rollout = self._rollouts.get(model)
            if rollout is None and (base / FOLDER).is_dir():
                rollout = _ModelRollout(
                    model, base / FOLDER, self._workers, server=self._server, shadow=self._shadow
                )
                rollout.read()
                if not rollout.number:
                    return None
                self._rollouts[model] = rollout
            return rollout

    def route(self, model: str, headers: Headers) -> Route | None:
        """The version for a request that names none; None: the model has no rollout."""
        rollout = self._rollouts.get(model)
        return None if rollout is None else rollout.route(headers)

    def add_outcomes(self, model: str, outcomes: Sequence[tuple[str, float]]) -> None:
        """Write what users did, as `Router` describes it."""
        rollout = self._rollouts.get(model)
        if rollout is None:
            raise ServeError(Code.NOT_FOUND, f"{model!r} has no A/B test under way")
        rollout.test.add_outcomes(model, outcomes)

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

    def copy(self, model: str, route: Route, request: RequestCopy) -> None:
        """Have the candidate answer a request in shadow, as `Router` describes it."""
        rollout = self._rollouts.get(model)
        if rollout is None:
            request.on_result(CopyResult(version=route.version, is_compared=False))
        else:
            rollout.copy(route, request)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Routing:
    """What one state says, ready to be asked."""

    state: RolloutState
    decide: Callable[[Headers], Route]
    """Gives the route of a request."""

    copied: float = 0.0
    """Share of the requests that are copied to the candidate."""

    @property
    def stage(self) -> int:
        return MEASURED if self.state.phase is Phase.MEASURING else self.state.stage

    @property
    def slow_s(self) -> float:
        """Latency above which an answer is slow for any gate, seconds."""
        active = self.state.phase in ACTIVE
        return min(self.state.slow_s.values(), default=math.inf) if active else math.inf

    def is_warming_up(self, now_s: float) -> bool:
        """Whether a stage has just begun, so that its latency is not judged."""
        state = self.state
        return state.phase is Phase.RUNNING and now_s < state.began_s + state.settings.warm_up_s


def _compared(state: RolloutState, split: TrafficSplit) -> tuple[int, ...]:
    """The versions whose latencies are compared; the baseline is measured as it will be compared."""
    if state.phase not in ACTIVE:
        return ()
    return (state.stable,) if state.phase is Phase.BAKING else tuple(split.weights)


def _copied(state: RolloutState) -> float:
    return state.current.shadow if state.phase in (Phase.RUNNING, Phase.PAUSED) else 0.0


def _shadow_decision(
    state: RolloutState, key_hash: Callable[[bytes], int]
) -> Callable[[Headers], Route]:
    """Routes to the baseline, whose answers count only where the candidate answers the same request."""
    share, key_of = _copied(state), _key_reader(state.settings.key)

    def in_shadow(headers: Headers) -> Route:
        key = key_of(headers)
        return Route(
            version=state.baseline,
            otherwise=state.baseline,
            key=key_hash(key) if key else None,
            counts=False,
            # With a key, requests without one are not part of the rollout.
            copied=bool(key or not state.settings.key) and random.random() < share,  # noqa: S311 - a sample
        )

    return in_shadow


def _key_reader(name: str) -> Callable[[Headers], bytes | None]:
    """Reads the key of a request: a header's value, or a cookie's if the name is `cookie:NAME`."""
    if not name:
        return lambda _: None
    kind, _, cookie = name.partition(":")
    if kind == "cookie":
        return lambda headers: _cookie(cookie.encode(), headers)
    lower = name.lower()
    return lambda headers: headers(lower)


def _decision(
    state: RolloutState, split: TrafficSplit, key_hash: Callable[[bytes], int]
) -> Callable[[Headers], Route]:
    """The function that routes by a state; all that does not depend on the request is done here, once."""
    is_active = state.phase in ACTIVE
    compared = _compared(state, split)
    test = state.rollout if state.is_test else 0

    def route_to(version: int, *, counts: bool = True, key: int | None = None) -> Route:
        return Route(
            version=version,
            otherwise=state.baseline,
            key=key,
            counts=counts,
            compared=compared,
            test=0 if key is None else test,
        )

    if state.phase not in (Phase.RUNNING, Phase.PAUSED, Phase.TESTING):
        stable = route_to(state.stable, counts=is_active)
        return lambda _: stable
    if _copied(state):
        return _shadow_decision(state, key_hash)
    fixed = {version: route_to(version) for version in split.weights}
    if state.current.header:
        header = state.current.header.lower()
        with_header, without = fixed[state.candidate], fixed[state.baseline]
        return lambda headers: without if headers(header) is None else with_header
    if not state.settings.key:
        return split.at_random(fixed)
    key_of, without_key = _key_reader(state.settings.key), route_to(state.baseline, counts=False)
    version_of = split.by_crc({version: version for version in split.weights})
    known: dict[bytes, Route] = {}

    def by_key(headers: Headers) -> Route:
        key = key_of(headers)
        if not key:  # an empty one would be one user for all who send it
            return without_key
        route = known.get(key)
        if route is None:
            route = route_to(version_of(zlib.crc32(key)), key=key_hash(key))
            if len(known) >= MOST_ROUTES:
                known.clear()
            known[key] = route
        return route

    return by_key


class _ModelRollout:
    """The rollout of one model."""

    def __init__(
        self, model: str, folder: Path, workers: Path | None, *, server: str, shadow: ShadowOptions
    ) -> None:
        self._model, self._folder, self._vetoes = model, folder, Vetoes(workers)
        self._spool = Spool(workers, folder)
        self.test = ABTestLogs(folder, server=server)
        self._shadow_options = shadow
        self._shadow: ShadowStage | None = None
        self._files = StateFiles(folder)
        self._lock = threading.Lock()
        self._counts: dict[int, dict[int, VersionCounts]] = {}
        self._keys, self.waiting = StageKeys(), WaitingAnswers()
        self._failed: dict[int, str] = {}
        self._blamed: dict[int, str] = {}
        self._slow = 0
        self._taken_vetoes: Mapping[tuple[str, int], str] = {}
        self._changed = False
        self._said_unreadable = self._said_unwritten = False
        self.read_s = time.monotonic()
        """When the state was last read, seconds of the monotonic clock."""

        self._routing: _Routing | None = None
        self.route: Callable[[Headers], Route | None] = _no_route
        """Gives the route of a request."""

        self.number = 0
        """Of the state; 0 before there is one."""

    def read(self) -> None:
        """Take up the newest state; while it cannot be read, the last one stays in force."""
        try:
            self._take_up(self._files.latest())
        except (DataError, OSError) as error:
            if not self.number:
                self._take_up(self._files.latest_whole())
            self._report(error)
            return
        self.read_s, self._said_unreadable = time.monotonic(), False

    def _report(self, error: Exception) -> None:
        """Log that the state cannot be read: once, when that has lasted."""
        unread_s = time.monotonic() - self.read_s
        if unread_s >= UNREADABLE_S and not self._said_unreadable:
            self._said_unreadable = True
            _log.error(
                "rollout of %s: its state cannot be read for %.0f s, the traffic stays as it is: %s",
                self._model,
                unread_s,
                error,
            )

    def _take_up(self, stored: Stored | None) -> None:
        vetoes = self._vetoes.reasons()
        if stored is None or (stored.number, vetoes) == (self.number, self._taken_vetoes):
            return
        state, before = state_of(stored.content["state"]), self._routing
        veto = vetoes.get((str(self._folder.parent), state.rollout))
        if veto is not None and state.phase in ACTIVE:
            state = roll_back(state, reason=veto, now_s=time.time())
        key_hash = self.test.take_up(state) or _short_hash
        split = state.split(self._model)
        routing = _Routing(
            state=state, decide=_decision(state, split, key_hash), copied=_copied(state)
        )
        with self._lock:
            self._count_waiting()  # in the stage in which they were answered
            self._end_shadow(routing)
            if before is None or state.rollout != before.state.rollout:
                self._counts, self._changed, self._failed, self._blamed = {}, False, {}, {}
            if before is None or routing.stage != before.stage:
                self._keys = StageKeys()
            self._routing, self.number, self._taken_vetoes = routing, stored.number, vetoes
            self.route = routing.decide

    def _end_shadow(self, routing: _Routing) -> None:
        """End a shadow stage that is over; the lock is held."""
        shadow = self._shadow
        if shadow is not None and not (routing.copied and shadow.is_of(routing.state)):
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

    def judges(self, version: int) -> bool:
        """Whether a version is under rollout."""
        routing = self._routing
        return (
            routing is not None
            and routing.state.phase in ACTIVE
            and version == routing.state.candidate
        )

    def blame(self, version: int, why: str) -> None:
        """Let the controller roll a version back."""
        with self._lock:
            self._blamed[version] = why

    def write(
        self,
        server: str,
        failed: Mapping[int, str],
        running: Callable[[], Iterable[RunningRequest]],
    ) -> None:
        self.test.refresh()
        with self._lock:
            self._count_waiting()
            routing, failed = self._routing, self._all_failed(failed)
            known = not self._changed and not self._slow and failed == self._failed
            if routing is None or (known and routing.state.phase not in ACTIVE):
                return
            counts = deepcopy(self._counts)
            warming_up = routing.is_warming_up(time.time())
            # After the copy: a request that ends in between is counted a second later, and never twice.
            slow = count_slow_running(
                counts.setdefault(routing.stage, {}),
                (each for each in running() if each.model == self._model),
                slow_s=math.inf if warming_up else routing.slow_s,
                counted=self._keys.slow,
            )
            if known and not slow:
                return
            self._changed, self._failed, self._slow = False, failed, slow
        try:
            self._spool.write(counts, failed, rollout=routing.state.rollout, server=server)
            self._said_unwritten = False
        except (UserError, OSError) as error:  # read-only, or full: written at the next chance
            self._changed = True
            if not self._said_unwritten:
                _log.error("rollout of %s: its counts cannot be written: %s", self._model, error)
            self._said_unwritten = True

    def unwritten(self) -> Mapping[str, Any] | None:
        """The counts of this server that could not be written next to the state."""
        if self._routing is None:
            return None
        rollout = self._routing.state.rollout
        return {"rollout": rollout, "processes": self._spool.read(rollout)}

    def _all_failed(self, failed: Mapping[int, str]) -> dict[int, str]:
        """Version -> why it cannot stay under rollout."""
        unloaded = {version: f"it cannot be loaded: {why}" for version, why in failed.items()}
        if self._shadow is None:
            return {**unloaded, **self._blamed}
        self._changed = True  # copies are compared after their requests have ended
        return {**unloaded, **self._blamed, **self._shadow.failed}

    def wanted(self, now_s: float) -> set[int] | None:
        if self._routing is None:
            return None
        state = self._routing.state
        if state.phase in (Phase.MEASURING, Phase.RUNNING, Phase.PAUSED) and state.current.shadow:
            return {state.baseline}  # the candidate runs in a process of its own
        if state.phase in ACTIVE or now_s < state.began_s + state.settings.keep_previous_s:
            return {state.stable, state.candidate, *state.arms} - set(state.rejected)
        return {state.stable}

    def count(self, run: AnsweredRun) -> None:
        """Count answers, at the latest when `write` is called; those of an A/B test at once."""
        if any(route.test for route in run.routes):
            for route in run.routes:
                self.test.record(route)
        elif self.waiting.add(run):
            with self._lock:
                self._count_waiting()

    def _count_waiting(self) -> None:
        """Count what waits in the stage that is in force; the lock is held."""
        routing = self._routing
        if routing is None or routing.state.phase not in ACTIVE:
            self.waiting.clear()
            return
        counts = self._counts.setdefault(routing.stage, {})
        self._changed |= self.waiting.count(
            counts,
            self._keys,
            slow_s=routing.slow_s,
            times_count=not routing.is_warming_up(time.time()),
        )


def _no_route(_: Headers) -> None:
    """Before there is a state."""


def _short_hash(key: bytes) -> int:
    return zlib.crc32(key) | len(key) << 32


def _cookie(name: bytes, headers: Headers) -> bytes | None:
    """The value of a cookie, None without it."""
    for part in (headers("cookie") or b"").split(b";"):
        given, _, value = part.partition(b"=")
        if given.strip() == name:
            return value.strip()
    return None
