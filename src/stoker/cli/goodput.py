"""The summary of a training's wall time that is printed for the user."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stoker.telemetry.run_time import seconds_of_run
from stoker.telemetry.wall_time import goodput, largest_other, shown_time

MINUTE_S = 60.0


def goodput_line(train: Mapping[str, Any]) -> str | None:
    """The share spent in steps, and the largest other part with advice on reducing it.

    Args:
        train: The facts of the stage `train`.

    Returns:
        E.g. `41 % of 25.3 s was steps; most of the rest: imports and start, 6.1 s (...)`; None if
        nothing was measured (parameter servers, or a run of an earlier Stoker).
    """
    if train.get("goodput") is None or "wall_time" not in train:
        return None
    parts = seconds_of_run(train["wall_time"])
    share = goodput(parts)
    if share is None:
        return None
    other, total_s = largest_other(parts), sum(parts.values()) - parts["other_stages"]
    return (
        f"{share:.0%} of {_shown(total_s)} was steps; most of the rest: {other.label}, "
        f"{_shown(parts[other.name])} ({other.advice})"
    )


def _shown(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < MINUTE_S else shown_time(seconds)
