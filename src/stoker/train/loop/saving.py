"""Writes and restores the checkpoints of a run, including the best state so far."""

from __future__ import annotations

import time
from typing import Any

from numpy.typing import NDArray

from stoker.train.callbacks.callbacks import Callbacks
from stoker.train.checkpoints.seeds import host_seeds, restore_host_seeds
from stoker.train.checkpoints.state import TrainingState
from stoker.train.checkpoints.store import VerifiedCheckpoint, best, newest_good
from stoker.train.checkpoints.writer import CheckpointWriter
from stoker.train.context.position import Position
from stoker.train.context.run_context import RunSetup
from stoker.train.loop.run_health import RunHealth


class RunCheckpoints:
    """The checkpoints of a run."""

    def __init__(
        self,
        state: TrainingState,
        callbacks: Callbacks,
        run_health: RunHealth,
        position: Position,
        setup: RunSetup,
        writer: CheckpointWriter | None,
    ) -> None:
        """Store the arguments; without a writer nothing is written."""
        self._state, self._callbacks, self._run_health = state, callbacks, run_health
        self._position, self._writer = position, writer
        self._distribution, self._context = setup.distribution, setup.context
        self._best: tuple[dict[str, NDArray[Any]], dict[str, Any], int, float] | None = None

    def due(self, *, after: int) -> bool:
        """Return whether a checkpoint is due after this many more steps."""
        return self._writer is not None and self._writer.due(self._position.step + after)

    def trained(self, steps: int, wall_s: float) -> None:
        """Record the time of a call of steps, for the interval between checkpoints."""
        if self._writer is not None:
            self._writer.trained(steps, wall_s)

    def keep_best(self, monitored: float) -> None:
        """Keep the current state as the best one, with its monitored value."""
        self._best = (*self._captured(), self._position.step, monitored)

    def best_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the variables of the best state so far."""
        if self._best is not None:
            return self._best[0]
        if self._writer is not None:
            self._writer.wait()
        return best(self._context.checkpoints).arrays()

    def save(self, *, now: bool = False) -> None:
        """Write the current state, and before it the best state, if that is not on the disk yet.

        Args:
            now: Whether to wait until they are on the disk.
        """
        begun_s = time.monotonic()
        kept, self._best = self._best, None
        if kept is not None and kept[2] < self._position.step:
            if self._writer is not None:
                arrays, facts, step, monitored = kept
                self._writer.save(arrays, facts, step=step, monitored=monitored)
            kept = None
        # A step has only one checkpoint. If its state is the best one, that is written, and not the current
        # state, which a callback may have changed.
        arrays, facts = self._captured() if kept is None else kept[:2]
        if self._writer is None:
            return
        step = self._position.step
        copied_s = time.monotonic() - begun_s
        self._writer.save(arrays, facts, step=step, monitored=kept and kept[3], copied_s=copied_s)
        if now:
            self._writer.wait()

    def newest(self) -> VerifiedCheckpoint | None:
        """Return the newest good checkpoint for a rollback; None if nothing is saved."""
        self._best = None
        if self._writer is not None:
            self._writer.wait()
        if self._distribution.workers > 1:
            # Wait for all workers: after this barrier, the chief's checkpoint is on the disk.
            self._state.capture()
        return newest_good(self._context.checkpoints)

    def restore(self, found: VerifiedCheckpoint, *, decided: bool = True) -> None:
        """Restore a checkpoint.

        Args:
            found: The checkpoint.
            decided: Whether to restore the decisions that were made during the run, too.
        """
        arrays = found.arrays()
        with self._distribution.strategy.scope():
            self._state.restore(arrays)
        restore_host_seeds(found.facts["host_seeds"])
        self._callbacks.set_state(found.facts["callbacks"], arrays)
        self._run_health.restore(found.facts["guard"], decided=decided)
        position = self._position
        self._context.writer.rewind(position.step, validated=position.validated)

    def _captured(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        facts, arrays = self._callbacks.state()
        return self._state.capture() | arrays, {
            "position": self._position.to_json(),
            "callbacks": facts,
            "host_seeds": host_seeds(),
            "guard": self._run_health.state(),
        }
