"""In a server: reads the rollout state of one model, routes its requests, and counts the answers."""

from __future__ import annotations

import logging
import math
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stoker.core.errors import DataError, UserError
from stoker.rollout.ab.logs import ABTestLogs
from stoker.rollout.control.vetoes import Vetoes
from stoker.rollout.counts.counted_keys import StageKeys
from stoker.rollout.counts.counts import UNLOADED
from stoker.rollout.counts.spool import Spool
from stoker.rollout.gates.gates import VersionCounts
from stoker.rollout.routing.answers import WaitingAnswers
from stoker.rollout.routing.decision import Routing, copied_share, decision
from stoker.rollout.routing.running import count_slow_running
from stoker.rollout.shadow.counts import ShadowTally
from stoker.rollout.shadow.stage import ShadowOptions, ShadowStage
from stoker.rollout.state.changes import bar, roll_back
from stoker.rollout.state.files import StateFiles, Stored
from stoker.rollout.state.state import ACTIVE, Phase, state_of
from stoker.serve.routing import (
    CopyResult,
    Decide,
    Headers,
    Outputs,
    RequestCopy,
    Route,
    RunningRequest,
    RunRequests,
)

_log = logging.getLogger(__name__)

UNREADABLE_S = 30.0
"""If the state cannot be read for this long, seconds, an error is logged."""


class ModelRollout:
    """The rollout of one model in a server process."""

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
        self._keys, self.waiting = StageKeys(), WaitingAnswers(self._count_full)
        self._failed: dict[int, str] = {}
        self._blamed: dict[int, str] = {}
        self._slow = 0
        self._taken_vetoes: Mapping[tuple[str, int], str] = {}
        self._changed = self._is_test = False
        self._said_unreadable = self._said_unwritten = False
        self.read_s = time.monotonic()
        """When the state was last read, seconds of the monotonic clock."""

        self._routing: Routing | None = None
        self.route: Decide = _no_route
        """Returns the route of a request."""

        self._stored: Stored | None = None

    @property
    def is_known(self) -> bool:
        """Whether a state has been read."""
        return self._stored is not None

    def read(self) -> None:
        """Read the newest state; if that fails, the last state stays in force."""
        try:
            self._take_up(self._files.latest())
        except (DataError, OSError) as error:
            if self._stored is None:
                self._take_up(self._files.latest_whole())
            self._report(error)
            return
        self.read_s, self._said_unreadable = time.monotonic(), False

    def _report(self, error: Exception) -> None:
        """Log once that the state could not be read for a long time."""
        unread_s = time.monotonic() - self.read_s
        if unread_s >= UNREADABLE_S and not self._said_unreadable:
            self._said_unreadable = True
            _log.error(
                "rollout of %s: its state has been unreadable for %.0f s, so the traffic stays as it is: %s",
                self._model,
                unread_s,
                error,
            )

    def _take_up(self, stored: Stored | None) -> None:
        vetoes = self._vetoes.reasons()
        if stored is None or (stored, vetoes) == (self._stored, self._taken_vetoes):
            return
        state, before = state_of(stored.content["state"]), self._routing
        veto = vetoes.get((str(self._folder.parent), state.rollout))
        if veto is not None and state.phase in ACTIVE:
            state = roll_back(bar(state, state.on_trial), reason=veto, now_s=time.time())
        key_hash = self.test.take_up(state) or _short_hash
        split = state.split(self._model)
        answered = self._record if state.is_test else self.waiting.add
        decide = decision(state, split, key_hash, answered, self._takes_copy)
        routing = Routing(state=state, decide=decide, copied=copied_share(state))
        if before is not None and before.state.began_s == state.began_s:
            routing = replace(routing, since_s=before.since_s)
        with self._lock:
            self._count_waiting()  # before the stage changes
            self._end_shadow(routing)
            if before is None or state.rollout != before.state.rollout:
                self._counts, self._changed, self._failed, self._blamed = {}, False, {}, {}
            if before is None or routing.stage != before.stage:
                self._keys = self._spool.keys(f"{state.rollout}-{routing.stage}")
            self._routing, self._stored, self._taken_vetoes = routing, stored, vetoes
            self.route, self._is_test = routing.decide, state.is_test

    def _end_shadow(self, routing: Routing) -> None:
        """End the process of a shadow stage that is over; the caller holds the lock."""
        shadow = self._shadow
        if shadow is not None and not (routing.copied and shadow.is_of(routing.state)):
            shadow.close()
            shadow.count_dropped()
            self._shadow = None

    def _takes_copy(self) -> bool:
        """Return whether to copy a request of a shadow stage; the first copy starts the candidate's process."""
        shadow = self._shadow
        return shadow is None or shadow.takes()

    def copy(self, route: Route, request: RequestCopy) -> None:
        """Send a copy of a request to the candidate; the first copy starts the candidate's process."""
        with self._lock:
            routing, shadow = self._routing, self._shadow
            if shadow is None and routing is not None and routing.copied:
                # Started with the first copy: a server process without requests needs no shadow process.
                shadow = self._shadow = ShadowStage(
                    self._model,
                    self._folder.parent,
                    routing.state,
                    ShadowTally(
                        self._counts.setdefault(routing.stage, {}), routing.state, self._keys
                    ),
                    self._lock,
                    self._shadow_options,
                )
            self._changed = True
        if shadow is None:
            request.on_result(CopyResult(version=route.version, is_compared=False))
        else:
            shadow.offer(route, request)

    def judges(self, version: int) -> bool:
        """Whether a version is in a rollout, so that a failure rolls it back."""
        routing = self._routing
        return routing is not None and version in routing.state.on_trial

    @property
    def load_limit_s(self) -> float:
        """The maximum load time of a version in a rollout, seconds."""
        return math.inf if self._routing is None else self._routing.state.settings.load_limit_s

    def blame(self, version: int, why: str) -> None:
        """Record a failure of a version, so that the controller rolls it back."""
        with self._lock:
            self._blamed[version] = why

    def write(
        self,
        server: str,
        failed: Mapping[int, str],
        running: Callable[[], Iterable[RunningRequest]],
    ) -> None:
        """Write the counts and the running requests that are already slow, if any of them has changed.

        Args:
            server: Name of this process.
            failed: Version -> why it cannot be loaded.
            running: Returns the running requests of all models.
        """
        self.test.refresh()
        with self._lock:
            self._count_waiting()
            routing, failed = self._routing, self._all_failed(failed)
            known = not self._changed and not self._slow and failed == self._failed
            if routing is None or (known and routing.state.phase not in ACTIVE):
                return
            counts = {
                stage: {version: each.copy() for version, each in versions.items()}
                for stage, versions in self._counts.items()
            }
            warming_up = routing.is_warming_up
            # Read the running requests after the counts were copied: a request that ends in between is then counted a
            # second later, and never twice.
            slow = count_slow_running(
                counts.setdefault(routing.stage, {}),
                (each for each in running() if each.model == self._model),
                slow_s=math.inf if warming_up else routing.slow_s,
                counted=self._keys,
            )
            if known and not slow:
                return
            self._changed, self._failed, self._slow = False, failed, slow
        try:
            self._spool.write(counts, failed, rollout=routing.state.rollout, server=server)
            self._said_unwritten = False
        except (UserError, OSError) as error:  # read-only or full: the next call tries again
            self._changed = True
            if not self._said_unwritten:
                _log.error("rollout of %s: its counts cannot be written: %s", self._model, error)
            self._said_unwritten = True

    def unwritten(self) -> Mapping[str, Any] | None:
        """Return the counts of this server that could not be written next to the state."""
        if self._routing is None:
            return None
        rollout = self._routing.state.rollout
        return {"rollout": rollout, "processes": self._spool.read(rollout)}

    def _all_failed(self, failed: Mapping[int, str]) -> dict[int, str]:
        """Return version -> why it must be rolled back."""
        unloaded = {version: f"{UNLOADED}: {why}" for version, why in failed.items()}
        if self._shadow is None:
            return {**unloaded, **self._blamed}
        self._shadow.count_dropped()
        self._changed = (
            True  # a copy is compared after its request was answered, so counts may have changed
        )
        return {**unloaded, **self._blamed, **self._shadow.failed}

    @property
    def barred(self) -> tuple[int, ...]:
        """The versions that must not be loaded, even if a label names them."""
        return () if self._routing is None else self._routing.state.barred

    def wanted(self, now_s: float) -> set[int] | None:
        """Return the versions that must be loaded; None if no state has been read yet."""
        if self._routing is None:
            return None
        state = self._routing.state
        if state.phase in (Phase.MEASURING, Phase.RUNNING, Phase.PAUSED) and state.current.shadow:
            return {state.baseline}  # the candidate runs in a separate process
        if state.phase in ACTIVE or now_s < state.began_s + state.settings.keep_previous_s:
            return {state.stable, state.candidate, *state.arms} - set(state.rejected)
        return {state.stable}

    def count(self, requests: RunRequests, outputs: Outputs, ended_s: float) -> None:
        """Queue answers, which `write` counts at the latest; answers of an A/B test are recorded immediately."""
        # the test that chose the version may have ended
        is_of_test = self._is_test or requests.routes[0].test
        (self._record if is_of_test else self.waiting.add)(requests, outputs, ended_s)

    def _record(self, requests: RunRequests, _outputs: Outputs, _ended_s: float) -> None:
        for route in requests.routes:
            self.test.record(route)

    def _count_full(self) -> None:
        with self._lock:
            self._count_waiting()

    def _count_waiting(self) -> None:
        """Count the queued answers for the current stage; the caller holds the lock."""
        routing = self._routing
        if routing is None or routing.state.phase not in ACTIVE:
            self.waiting.clear()
            return
        counts = self._counts.setdefault(routing.stage, {})
        self._changed |= self.waiting.count(
            counts,
            self._keys,
            slow_s=routing.slow_s,
            times_count=not routing.is_warming_up,
        )


def _no_route(_: Headers) -> None:
    """Raise an error, because no state has been read yet."""


def _short_hash(key: bytes) -> int:
    return zlib.crc32(key) | len(key) << 32
