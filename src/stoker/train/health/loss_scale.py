"""Detects a collapsing loss scale: float16 gradients overflow again and again, or vanish."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stoker.core.finding import Finding

LEAST = 1.0
"""Below it, scaling makes gradients smaller, the opposite of its purpose."""

HALVINGS = 8
"""Halvings without a recovery. From Keras's 2**15, some are usual at the start."""


class LossScaleWatch:
    """Watches the scale of a `LossScaleOptimizer`; its state is JSON, for a checkpoint."""

    def __init__(self, *, least: float = LEAST, halvings: int = HALVINGS) -> None:
        self._least = least
        self._halvings = halvings
        self._top = 0.0
        self._last = 0.0
        self._reported = False

    def update(self, step: int, scale: float) -> Finding | None:
        """Add a value of the scale.

        Args:
            step: The step after which it has this value.
            scale: The scale; there may be several halvings between two calls.

        Returns:
            A finding once per fall: below `least`, or halved `halvings` times without a rise.
        """
        if scale > self._last:
            self._top, self._reported = scale, False
        self._last = scale
        if self._reported:
            return None
        fallen = math.log2(self._top / scale) if scale > 0 else math.inf
        if scale >= self._least and fallen < self._halvings:
            return None
        self._reported = True
        return Finding(
            kind="loss_scale",
            severity="warning",
            message=(
                f"the loss scale collapses: from {self._top:g} to {scale:g} at step {step} without "
                "a rise between; each halving is a step whose float16 gradients overflowed and "
                "that was skipped"
            ),
            fix="Set train.precision: mixed_bfloat16 or float32, or lower the learning rate.",
        )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        return {"top": self._top, "last": self._last, "said": self._reported}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self._top, self._last, self._reported = state["top"], state["last"], state["said"]
