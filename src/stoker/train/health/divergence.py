"""Detects a diverging loss and a collapsing loss scale, before values become infinite or zero."""

from __future__ import annotations

import math
import statistics
import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.core.errors import ConfigError, Finding

SPREADS = 10.0
"""A loss counts as high only if its distance from the window's median is more than this many times the
median distance, because batches differ."""

GROWTH = 1.1
"""A loss counts as growing if its distance from the median increases by this factor between the first and
the second half of the counted updates. A jump to a new level, e.g. after a change of the data, does not
grow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceConfig:
    """When a growing loss counts as divergence."""

    factor: float = 3.0
    """A loss counts as high if it is more than this many times its running median."""

    updates: int = 20
    """Number of consecutive updates with a high loss that count as divergence if the loss grows."""

    window: int = 200
    """Number of updates that the running median covers."""

    def __post_init__(self) -> None:
        if not self.factor > 1:
            raise ConfigError("train.divergence.factor must be above 1", got=self.factor)
        if not 2 <= self.updates <= self.window:
            raise ConfigError(
                "train.divergence.updates must be from 2 to train.divergence.window",
                got=self.updates,
            )


class _Window:
    """The last values, which are also stored in sorted order, because their median is computed often."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._last: deque[float] = deque()
        self._in_order: list[float] = []

    def __len__(self) -> int:
        return len(self._last)

    def __iter__(self) -> Iterator[float]:
        return iter(self._last)

    def extend(self, values: Iterable[float]) -> None:
        """Add values; drop the oldest ones if there are more than the size."""
        for value in values:
            self._last.append(value)
            insort(self._in_order, value)
            if len(self._last) > self._size:
                del self._in_order[bisect_left(self._in_order, self._last.popleft())]

    def median(self) -> float:
        """Return the median, as `statistics.median` does."""
        middle = len(self._in_order) // 2
        if len(self._in_order) % 2:
            return self._in_order[middle]
        return (self._in_order[middle - 1] + self._in_order[middle]) / 2


class Divergence:
    """Watches the loss for divergence; its state is JSON and is stored in checkpoints."""

    def __init__(self, config: DivergenceConfig) -> None:
        self._config = config
        self._calm = _Window(config.window)
        self._high: list[float] = []
        self._since = 0
        self._reported = False

    def update(self, step: int, loss: float) -> Finding | None:
        """Add a loss, and check for divergence.

        Args:
            step: The step of the loss; for a mean, its last step.
            loss: The loss; if it is not finite, it counts as very large.

        Returns:
            A finding, once per episode, if the loss is high for `updates` updates in a row and grows. A
            high loss that does not grow is added to the median after `window` updates.
        """
        value = loss if math.isfinite(loss) else sys.float_info.max
        if not self._calm or self._is_calm(value):
            self._calm.extend([] if self._reported else self._high)
            self._calm.extend([value])
            self._high, self._reported = [], False
            return None
        if self._reported:
            return None
        if not self._high:
            self._since = step
        self._high.append(value)
        if len(self._high) < self._config.updates:
            return None
        recent = self._high[-self._config.updates :]
        half = len(recent) // 2
        middle = self._calm.median()
        earlier = statistics.median(recent[:half]) - middle
        if statistics.median(recent[half:]) - middle > GROWTH * earlier:
            self._reported = True
            return self._finding(step, loss)
        if len(self._high) >= self._config.window:
            self._calm.extend(self._high)
            self._high = []
        return None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        return {
            "calm": list(self._calm),
            "high": self._high,
            "since": self._since,
            "said": self._reported,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self._calm = _Window(self._config.window)
        self._calm.extend(state["calm"])
        self._high = list(state["high"])
        self._since, self._reported = state["since"], state["said"]

    def _is_calm(self, value: float) -> bool:
        middle = self._calm.median()
        if value <= middle + (self._config.factor - 1) * abs(middle):
            return True
        # A multiple of the median is useless if the loss is zero or negative; the spread around the median is not.
        return value <= middle + SPREADS * statistics.median(abs(v - middle) for v in self._calm)

    def _finding(self, step: int, loss: float) -> Finding:
        middle = self._calm.median()
        return Finding.warning(
            "divergence",
            f"training diverges: since step {self._since} the loss has left its median "
            f"{middle:.4g}, and at step {step} it is {loss:.4g} and growing",
            fix="Lower the learning rate (try a tenth), warm it up, or set train.clip_norm: 1.0.",
        )


MIN_SCALE = 1.0
"""A loss scale below this collapses: it makes gradients smaller, the opposite of its purpose."""

HALVINGS = 8
"""A loss scale that is halved this many times without a rise collapses. From Keras's initial 2**15, a few
halvings are usual."""


class LossScaleWatch:
    """Watches the scale of a `LossScaleOptimizer`; its state is JSON, for a checkpoint."""

    def __init__(self) -> None:
        self._top = 0.0
        self._last = 0.0
        self._reported = False

    def update(self, step: int, scale: float) -> Finding | None:
        """Add a value of the scale, and check whether it collapses.

        Args:
            step: The step after which the scale has this value.
            scale: The scale; it may have been halved several times since the last call.

        Returns:
            A finding if the scale is below `MIN_SCALE`, or was halved `HALVINGS` times without a rise;
            only once until the scale rises.
        """
        if scale > self._last:
            self._top, self._reported = scale, False
        self._last = scale
        if self._reported:
            return None
        fallen = math.log2(self._top / scale) if scale > 0 else math.inf
        if scale >= MIN_SCALE and fallen < HALVINGS:
            return None
        self._reported = True
        return Finding.warning(
            "loss_scale",
            f"the loss scale collapses: from {self._top:g} to {scale:g} at step {step} without "
            "rising in between; each halving is a skipped step, because its float16 gradients "
            "overflowed",
            fix="Set train.precision: mixed_bfloat16 or float32, or lower the learning rate.",
        )

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint, as JSON."""
        return {"top": self._top, "last": self._last, "said": self._reported}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state`."""
        self._top, self._last, self._reported = state["top"], state["last"], state["said"]
