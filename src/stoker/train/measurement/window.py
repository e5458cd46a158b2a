"""A stretch of time in which a part of training ran, and what was seen of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["resident", "called", "real", "input"]
"""resident: the compiled step on one batch in memory. called: the calls of training on such a batch,
all of their Python included. real: training as it is. input: batches are taken and thrown away."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """What was seen in a stretch of time."""

    kind: Kind
    steps: int
    rows: float
    wall_s: float
    wait_s: float
    """Of it, blocked in `next(iterator)`; of a window of input all."""
    cpu_s: float
    """CPU time of the process, all threads."""

    @property
    def rows_per_s(self) -> float:
        """Samples in a second of wall time."""
        return self.rows / self.wall_s
