"""Which checkpoints may go, once a newer one is there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """What retention has to know of one checkpoint."""

    name: str
    """Its folder's name."""

    step: int
    """Steps that were done when it was written."""

    elapsed_s: float
    """Time that the run had trained by then, over all its processes, seconds. Not the time of day:
    that can jump."""


def superseded(
    older: Sequence[CheckpointInfo],
    newest: CheckpointInfo,
    *,
    best: str | None,
    keep_last: int,
    every_h: float | None,
) -> list[str]:
    """Names of the checkpoints that may go.

    Args:
        older: The good ones before the newest, the oldest first.
        newest: The one that has just been published; it stays.
        best: Name of the one with the best monitored value.
        keep_last: How many of the newest stay, `newest` among them.
        every_h: The first one after every so many hours of training stays; None: none does.
    """
    alone = [kept for kept in older if kept.step != newest.step]
    stay = {kept.name for kept in [*alone, newest][-keep_last:]} | {best}
    if every_h is not None:
        stay |= _first_of_each([*alone, newest], every_h * _HOUR_S)
    return [kept.name for kept in older if kept.name not in stay]


def _first_of_each(checkpoints: Sequence[CheckpointInfo], interval_s: float) -> set[str]:
    first: dict[int, str] = {}
    for kept in checkpoints:
        first.setdefault(int(kept.elapsed_s // interval_s), kept.name)
    # The first interval is that of the run's beginning: nobody goes back to it.
    first.pop(0, None)
    return set(first.values())
