"""Writers of metrics: one small interface, composed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class MetricWriter(Protocol):
    """Receives scalars of a step, and can be closed.

    A full or missing disk does not end training: what cannot be written is lost, and logged once.
    """

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of one step; NaN and infinity are written as they are."""

    def rewind(self, step: int, *, validated: bool = True) -> None:
        """Forget what was written for later steps: training continues from this one.

        Args:
            step: Steps done.
            validated: Whether an epoch that ends with this step was already validated; if it was
                not, what was written at its end is also forgotten.
        """

    def close(self) -> None:
        """Flush everything to the disk; nothing may be written afterwards."""


class Everywhere:
    """Passes every scalar to several writers, in order."""

    def __init__(self, writers: Iterable[MetricWriter]) -> None:
        self._writers = tuple(writers)

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write to each writer."""
        for writer in self._writers:
            writer.write(step, scalars)

    def rewind(self, step: int, *, validated: bool = True) -> None:
        """Rewind each writer."""
        for writer in self._writers:
            writer.rewind(step, validated=validated)

    def close(self) -> None:
        """Close each writer."""
        for writer in self._writers:
            writer.close()
