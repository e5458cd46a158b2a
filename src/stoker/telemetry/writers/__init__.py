"""The interface of all writers of metrics, and a writer that passes metrics to several others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol


class MetricWriter(Protocol):
    """Receives the scalars of each step.

    A full or missing disk does not end training: values that cannot be written are lost, and one warning is logged.
    """

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write the scalars of one step; NaN and infinity are allowed."""

    def rewind(self, step: int, *, validated: bool = True) -> None:
        """Forget the values of later steps: training continues from this step.

        Args:
            step: Number of steps done.
            validated: Whether an epoch that ends with this step was already validated. If not, the values at the
                end of this epoch are forgotten too.
        """

    def close(self) -> None:
        """Flush everything to the disk; `write` must not be called after this."""


class Everywhere:
    """A `MetricWriter` that passes everything to several writers, in order."""

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
