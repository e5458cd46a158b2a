"""A period of time in which a part of training ran, and its measurements."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["resident", "called", "real", "input"]
"""resident: the compiled step on one batch in memory. called: calls of training on such a batch,
including their Python code. real: training as it is. input: batches are taken and dropped."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The measurements of a period of time."""

    kind: Kind
    steps: int
    rows: float
    wall_s: float
    wait_s: float
    """Part of it blocked in `next(iterator)`; all of it in a window of input."""
    cpu_s: float
    """CPU time of the process, all threads."""

    @property
    def rows_per_s(self) -> float:
        """Samples per second of wall time."""
        return self.rows / self.wall_s
