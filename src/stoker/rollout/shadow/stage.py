"""A shadow stage in one server: the process that runs the candidate, and its counts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from stoker.rollout.shadow.channel import ShadowTarget
from stoker.rollout.shadow.compare import Comparison
from stoker.rollout.shadow.counts import ShadowTally
from stoker.rollout.shadow.shadow import Shadow, ShadowLimits, result_of
from stoker.rollout.state.state import RolloutState
from stoker.serve.routing import CopyResult, RequestCopy, Route


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowOptions:
    """Settings of shadow processes, the same for the whole server."""

    allow_ops: tuple[str, ...] = ()
    """Operations that a model may contain in addition to the stateless ones."""

    saved_model_tags: tuple[str, ...] = ("serve",)
    """Tags of the SavedModel's graph to load."""

    limits: ShadowLimits = field(default_factory=ShadowLimits)
    """Limits of the shadow process."""


class ShadowStage:
    """One shadow stage; thread-safe."""

    def __init__(
        self,
        model: str,
        base: Path,
        state: RolloutState,
        tally: ShadowTally,
        lock: threading.Lock,
        options: ShadowOptions,
    ) -> None:
        """Start the process of the candidate.

        Args:
            model: Name of the model.
            base: The folder of the model's versions.
            state: State of the rollout, which is in its shadow stage; the caller holds `lock`.
            tally: The counts of the stage, which are increased.
            lock: Lock of the counts.
            options: How versions run in shadow.
        """
        self._state, self._lock = state, lock
        self._tally = tally
        self._passing = threading.Lock()
        self._passed = 0  # requests that `takes` refused and that are not counted yet
        self._on_result: Callable[[CopyResult], None] | None = None
        self._shadow = Shadow(
            ShadowTarget(
                model=model,
                baseline=str(base / str(state.baseline)),
                candidate=str(base / str(state.candidate)),
                tolerance=state.settings.shadow_tolerance,
                allow_ops=options.allow_ops,
                saved_model_tags=options.saved_model_tags,
            ),
            self._end,
            options.limits,
        )

    def is_of(self, state: RolloutState) -> bool:
        """Return whether a state is in this shadow stage."""
        return (self._state.rollout, self._state.stage) == (state.rollout, state.stage)

    @property
    def failed(self) -> Mapping[int, str]:
        """Return the candidate -> why it was abandoned; empty if it was not."""
        reason = self._shadow.failure
        return {self._state.candidate: reason} if reason else {}

    def takes(self) -> bool:
        """Return whether to copy a request now; if not, the copy is counted as dropped."""
        if self._shadow.is_free:
            return True
        with self._passing:
            self._passed += 1
        return False

    def offer(self, route: Route, request: RequestCopy) -> None:
        """Take a copy of a request for the candidate, or drop it; does not wait."""
        self._on_result = request.on_result
        self._shadow.offer(route, request)

    def count_dropped(self) -> None:
        """Count the requests that `takes` has refused; the caller holds the lock of the counts."""
        with self._passing:
            passed, self._passed = self._passed, 0
        if passed and self._on_result is not None:
            self._tally.dropped(passed)
            self._on_result(result_of(self._state.candidate, None, copies=passed))

    def close(self) -> None:
        """Kill the process; does not wait."""
        self._shadow.close()

    def _end(self, route: Route, request: RequestCopy, found: Comparison | None) -> None:
        with self._lock:
            if found is None:
                self._tally.dropped(1)
            else:
                self._tally.compared(route.key, found, baseline_s=request.took_s)
        request.on_result(result_of(self._state.candidate, found))
