"""The rule by which a launcher decides that a worker hangs. Time is an argument."""

from __future__ import annotations

import math
from dataclasses import dataclass

from stoker.cluster.launch.member import EVERY_S, Beat, Phase

PATIENCE = 10
"""Factor of the limit for start-up, the first step, validation and saving: tracing and XLA's
compilation take minutes where a step takes milliseconds."""

START_SILENT_S = 60.0
"""Shortest limit before the first step, seconds: loading a library blocks the threads of a worker."""

SILENT_S = 5 * EVERY_S
"""A worker without a heartbeat for this many seconds is the one that the others wait for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hang:
    """Training does not progress, and these workers cause it."""

    ranks: tuple[int, ...]
    """The silent workers; if all send heartbeats, those that are furthest behind."""

    why: str
    """A clause: what was missing, and for how long."""


@dataclass(slots=True)
class _Known:
    heard_s: float
    moved_s: float
    phase: Phase = "start"
    step: int = 0
    stepped: bool = False

    @property
    def expected(self) -> bool:
        """Whether it must make steps, now or later."""
        return self.phase not in ("serve", "done")


class Watchdog:
    """The last known state of each worker that has not ended."""

    def __init__(self, limit_s: float) -> None:
        """Watch no worker yet.

        Args:
            limit_s: Longest time without a heartbeat, or in the phase `train` without a step.
        """
        self.limit_s = limit_s
        self._known: dict[int, _Known] = {}

    def began(self, rank: int, *, now_s: float) -> None:
        """Watch a worker that was just started.

        Args:
            rank: The worker's rank.
            now_s: A monotonic clock, here and in all methods.
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
        """Do not count a pause in which the launcher itself did not run."""
        for known in self._known.values():
            known.heard_s += pause_s
            known.moved_s += pause_s

    def all_done(self) -> bool:
        """Whether every worker that has not ended is done, or only serves."""
        return not any(known.expected for known in self._known.values())

    def is_done(self, rank: int) -> bool:
        """Whether a worker has reported that its work is done."""
        known = self._known.get(rank)
        return known is not None and known.phase == "done"

    def silent(self, now_s: float) -> tuple[int, ...]:
        """The ranks of workers that are past their start and have been silent for a while."""
        after_s = min(SILENT_S, self.limit_s)
        return tuple(
            rank
            for rank, known in self._known.items()
            if known.phase not in ("start", "done") and now_s - known.heard_s > after_s
        )

    def hang(self, now_s: float) -> Hang | None:
        """The workers that hang; None if no time limit is exceeded."""
        mute = [r for r, known in self._known.items() if self._is_mute(known, now_s)]
        due_s = min((self._due_s(known) for known in self._known.values()), default=math.inf)
        if not mute and now_s <= due_s:
            return None
        if silent := tuple({*mute, *self.silent(now_s)}):
            longest_s = max(now_s - self._known[rank].heard_s for rank in silent)
            return Hang(ranks=silent, why=f"no heartbeat for {longest_s:.0f} s")
        expected = {rank: known for rank, known in self._known.items() if known.expected}
        if any(known.heard_s < due_s for known in expected.values()):
            # Its next heartbeat shows whether it is a step behind or stopped.
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
        """When it must have reached its next step or phase."""
        if not known.expected:
            return math.inf
        in_step = known.phase == "train" and known.stepped
        return known.moved_s + (self.limit_s if in_step else PATIENCE * self.limit_s)
