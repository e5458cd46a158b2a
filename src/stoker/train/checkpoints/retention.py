"""Selects the checkpoints to delete after a new one was written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointInfo:
    """The facts about a checkpoint that retention needs."""

    name: str
    """Its folder's name."""

    step: int
    """Steps that were done when it was written."""

    elapsed_s: float
    """Training time of the run until then, over all its processes, seconds. Not the time of day,
    which can jump."""


def superseded(
    older: Sequence[CheckpointInfo],
    newest: CheckpointInfo,
    *,
    best: str | None,
    keep_last: int,
    every_h: float | None,
) -> list[str]:
    """Return the names of the checkpoints to delete.

    Args:
        older: The good ones before the newest, oldest first.
        newest: The one just published; it is kept.
        best: Name of the one with the best monitored value.
        keep_last: How many of the newest are kept, including `newest`.
        every_h: Keep the first one of each interval of this many hours of training; None: keep
            none.
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
    # The first interval is the start of the run, to which no one returns.
    first.pop(0, None)
    return set(first.values())
