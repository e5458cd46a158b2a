"""Divergence: a loss that runs away from where it was, named before it is infinite."""

from __future__ import annotations

import math
import statistics
import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from stoker.core.errors import ConfigError
from stoker.core.finding import Finding

SPREADS = 10.0
"""A loss counts as high only beyond so many median deviations of the window: batches differ."""

GROWTH = 1.1
"""Growing is what has moved so much further from the median within the updates that are counted: a
jump to a new level, as after a change of the data, has not."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DivergenceConfig:
    """When a growing loss is called divergence."""

    factor: float = 3.0
    """How many times its own running median the loss must reach."""

    updates: int = 20
    """For how many updates in a row."""

    window: int = 200
    """Updates that the running median is taken over."""

    def __post_init__(self) -> None:
        if not self.factor > 1:
            raise ConfigError("train.divergence.factor must be above 1", got=self.factor)
        if not 2 <= self.updates <= self.window:
            raise ConfigError(
                "train.divergence.updates must be from 2 to train.divergence.window",
                got=self.updates,
            )


class _Window:
    """The last values, kept in order too: their median is asked for after every call."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._last: deque[float] = deque()
        self._in_order: list[float] = []

    def __len__(self) -> int:
        return len(self._last)

    def __iter__(self) -> Iterator[float]:
        return iter(self._last)

    def extend(self, values: Iterable[float]) -> None:
        """More values; the oldest ones beyond the size are forgotten."""
        for value in values:
            self._last.append(value)
            insort(self._in_order, value)
            if len(self._last) > self._size:
                del self._in_order[bisect_left(self._in_order, self._last.popleft())]

    def median(self) -> float:
        """As `statistics.median`."""
        middle = len(self._in_order) // 2
        if len(self._in_order) % 2:
            return self._in_order[middle]
        return (self._in_order[middle - 1] + self._in_order[middle]) / 2


class Divergence:
    """Watches the loss; its state is JSON and belongs into a checkpoint."""

    def __init__(self, config: DivergenceConfig) -> None:
        self._config = config
        self._calm = _Window(config.window)
        self._high: list[float] = []
        self._since = 0
        self._reported = False

    def update(self, step: int, loss: float) -> Finding | None:
        """One more loss.

        Args:
            step: The step that it belongs to, or the last one of those it is the mean of.
            loss: It counts as very large where it is not finite.

        Returns:
            A finding once an episode: `factor` times the median for `updates` in a row, and
            growing. A loss that stays high without growing becomes the new median.
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
        """What a checkpoint keeps, as JSON."""
        return {
            "calm": list(self._calm),
            "high": self._high,
            "since": self._since,
            "said": self._reported,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned."""
        self._calm = _Window(self._config.window)
        self._calm.extend(state["calm"])
        self._high = list(state["high"])
        self._since, self._reported = state["since"], state["said"]

    def _is_calm(self, value: float) -> bool:
        middle = self._calm.median()
        if value <= middle + (self._config.factor - 1) * abs(middle):
            return True
        # A loss may be zero or negative: then a multiple of it means nothing, its spread does.
        return value <= middle + SPREADS * statistics.median(abs(v - middle) for v in self._calm)

    def _finding(self, step: int, loss: float) -> Finding:
        middle = self._calm.median()
        return Finding(
            kind="divergence",
            severity="warning",
            message=(
                f"training diverges: since step {self._since} the loss has left its median "
                f"{middle:.4g}, and at step {step} it is {loss:.4g} and growing"
            ),
            fix="Lower the learning rate (try a tenth), warm it up, or set train.clip_norm: 1.0.",
        )
