"""Decides whether a worker hangs, for a launcher. The time is an argument of all methods."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker.cluster.launch.member import EVERY_S, Beat, Phase

PATIENCE = 10
"""Start-up, the first step, validation and saving may take this many times the limit of a step: tracing and XLA's
compilation take minutes, even if a step takes milliseconds."""

START_SILENT_S = 60.0
"""Minimum limit of the time without a heartbeat in the phase `start`, seconds: loading a library blocks the worker's
threads."""

SILENT_S = 5 * EVERY_S
"""If workers make no progress, a worker without a heartbeat for this many seconds is taken as the cause."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """Training makes no progress, and these workers are the cause."""

    ranks: tuple[int, ...]
    """The workers without heartbeats; if all send heartbeats, the workers with the lowest step."""

    why: str
    """A clause that says what was missing, and for how long."""


@dataclass(slots=True)
class _Known:
    heard_s: float
    moved_s: float
    phase: Phase = "start"
    step: int = 0
    stepped: bool = False

    @property
    def expected(self) -> bool:
        """Whether the worker must still make steps, now or later."""
        return self.phase not in ("serve", "done")


class Watchdog:
    """The last known state of each worker that has not ended."""

    def __init__(self, limit_s: float) -> None:
        """Create a watchdog that watches no worker yet.

        Args:
            limit_s: Maximum time without a heartbeat, or, in the phase `train`, without a step, seconds.
        """
        self.limit_s = limit_s
        self._known: dict[int, _Known] = {}

    def began(self, rank: int, *, now_s: float) -> None:
        """Watch a worker that was just started.

        Args:
            rank: The worker's rank.
            now_s: Time on a monotonic clock, here and in all methods.
        """
        self._known[rank] = _Known(heard_s=now_s, moved_s=now_s)

    def heard(self, beat: Beat, *, now_s: float) -> None:
        """Record a heartbeat."""
        known = self._known.get(beat.rank)
        if known is None:
            return
        known.heard_s = now_s
        if (beat.phase, beat.step) != (known.phase, known.step):
            known.moved_s = now_s
            known.stepped |= beat.step != known.step
            known.phase, known.step = beat.phase, beat.step

    def ended(self, rank: int) -> None:
        """Stop watching a worker."""
        self._known.pop(rank, None)

    def forgive(self, pause_s: float) -> None:
        """Extend all limits by a pause in which the launcher itself did not run."""
        for known in self._known.values():
            known.heard_s += pause_s
            known.moved_s += pause_s

    def all_done(self) -> bool:
        """Whether no running worker has steps left: each has reported the phase `done` or `serve`."""
        return not any(known.expected for known in self._known.values())

    def is_done(self, rank: int) -> bool:
        """Whether a worker has reported that its work is done."""
        known = self._known.get(rank)
        return known is not None and known.phase == "done"

    def silent(self, now_s: float) -> tuple[int, ...]:
        """Return the ranks of workers without a recent heartbeat, except in the phases `start` and `done`."""
        after_s = min(SILENT_S, self.limit_s)
        return tuple(
            rank
            for rank, known in self._known.items()
            if known.phase not in ("start", "done") and now_s - known.heard_s > after_s
        )

    def hang(self, now_s: float) -> Hang | None:
        """Return the workers that hang; None if no time limit is exceeded."""
        mute = [r for r, known in self._known.items() if self._is_mute(known, now_s)]
        due_s = min((self._due_s(known) for known in self._known.values()), default=math.inf)
        if not mute and now_s <= due_s:
            return None
        if silent := tuple({*mute, *self.silent(now_s)}):
            longest_s = max(now_s - self._known[rank].heard_s for rank in silent)
            return Hang(ranks=silent, why=f"no heartbeat for {longest_s:.0f} s")
        expected = {rank: known for rank, known in self._known.items() if known.expected}
        if any(known.heard_s < due_s for known in expected.values()):
            # Wait for the next heartbeat of this worker: it shows whether the worker makes steps.
            return None
        least = min(known.step for known in expected.values())
        ranks = tuple(rank for rank, known in expected.items() if known.step == least)
        first = expected[ranks[0]]
        return Hang(
            ranks=ranks,
            why=f"at step {least}, phase {first.phase}, for {now_s - first.moved_s:.0f} s",
        )

    def _is_mute(self, known: _Known, now_s: float) -> bool:
        if known.phase == "done":
            return False
        limit_s = max(self.limit_s, START_SILENT_S) if known.phase == "start" else self.limit_s
        return now_s - known.heard_s > limit_s

    def _due_s(self, known: _Known) -> float:
        """Return the time by which a worker must have reached its next step or phase."""
        if not known.expected:
            return math.inf
        in_step = known.phase == "train" and known.stepped
        return known.moved_s + (self.limit_s if in_step else PATIENCE * self.limit_s)
