"""Where metrics go: one small interface, composed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class MetricWriter(Protocol):
    """Takes scalars of a step, and may be closed.

    A disk that is full or gone does not end training: what cannot be written is lost, and logged once.
    """

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take the scalars of one step; NaN and infinity are written as they are."""

    def rewind(self, step: int, *, validated: bool = True) -> None:
        """Forget what was written for later steps: training goes on from this one.

        Args:
            step: Steps done.
            validated: Whether an epoch that ends with this step is validated already; where it is
                not, what was written at its end is forgotten too.
        """

    def close(self) -> None:
        """Make what was written durable; nothing may be written afterwards."""


class Everywhere:
    """Hands every scalar to each of several writers, in order."""

    def __init__(self, writers: Iterable[MetricWriter]) -> None:
        self._writers = tuple(writers)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write to each."""
        for writer in self._writers:
            writer.write(step, scalars)

    def rewind(self, step: int, *, validated: bool = True) -> None:
        """Rewind each."""
        for writer in self._writers:
            writer.rewind(step, validated=validated)

    def close(self) -> None:
        """Close each."""
        for writer in self._writers:
            writer.close()
