"""`stoker tune --check`: do the lock file's figures still hold, and was the machine quiet enough to tell?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.tune.compare import Load

BUSY_SLACK = 0.05
"""How far the interval of the busy fraction may be below that of the promise."""

SPEED_SLACK = 0.2
"""By which share samples per second may be fewer, relative to the machine's speed at the time of the promise."""

CHECKS = 3
"""Number of processes that measure on a quiet machine before a promise counts as broken."""

MAX_CHECKS = 6
"""Number of processes that measure on a busy machine: it may be quiet for a later one."""

SLOWER_SHARE = 0.05
"""By which share the machine itself must be slower to be reported."""

_TIME_FACTOR = 1.5
"""Another process measures if the remaining time is this many times the first one's duration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Measurement of one process."""

    figures: dict[str, Any]
    """Name in the lock file -> figure."""

    load: Load | None = None
    """Load of other processes meanwhile; None if unknown."""

    @property
    def is_quiet(self) -> bool:
        """Whether no other load is known."""
        return self.load is None or self.load.is_quiet


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """Measurements of all processes together."""

    figures: dict[str, Any]
    """Name -> median over the processes that had a quiet machine; over all if none had."""

    loads: tuple[Load | None, ...]
    """Load of other processes during each measurement, in order."""

    def not_quiet(self) -> str:
        """Return a sentence about the load of other processes; empty if the machine was quiet."""
        loaded = [load for load in self.loads if load is not None and not load.is_quiet]
        if not loaded:
            return ""
        worst = max(loaded, key=lambda load: load.others)
        count = f"{len(loaded)} of {len(self.loads)} measurements"
        text = f"The machine was not quiet: {worst.text()} during {count}"
        if len(loaded) < len(self.loads):
            return f"{text}; the others decide."
        return f"{text}. Run the check again when nothing else runs."


def settled(
    measure: Callable[[float], Measured], promised: Mapping[str, float], *, within_s: float
) -> Settled:
    """Measure once if that confirms the promise, otherwise as often as the time allows.

    Processes with the same code differ by some per cent, so a single one does not disprove a promise;
    and one that shared its cores proves nothing if another one did not.

    Args:
        measure: Measures in a new process, within a number of seconds.
        promised: Name -> figure.
        within_s: Longest time for everything, seconds.

    Raises:
        TrialFailed: the first process did not end in time, or one of them could not measure.
    """
    began_s = time.monotonic()
    found = [measure(within_s)]
    longest_s = time.monotonic() - began_s
    while any(broken(promised, found[0].figures)) and not _is_enough(found):
        left_s = began_s + within_s - time.monotonic()
        if left_s < _TIME_FACTOR * longest_s:
            break
        found.append(measure(left_s))
    judged = [each.figures for each in found if each.is_quiet] or [each.figures for each in found]
    figures = {
        name: None if value is None else statistics.median(each[name] for each in judged)
        for name, value in judged[0].items()
    }
    return Settled(figures=figures, loads=tuple(each.load for each in found))


def _is_enough(found: Sequence[Measured]) -> bool:
    return len(found) >= MAX_CHECKS or sum(each.is_quiet for each in found) >= CHECKS


def broken(promised: Mapping[str, float], now: Mapping[str, float]) -> Iterator[str]:
    """Yield a sentence for each figure of a promise that does not hold."""
    # A device cannot be busy for more than all of the time: a promise above 1 was noise. And every
    # value of an interval is as likely as its median, so only an interval below the other breaks a
    # promise.
    low = promised.get("busy_low", promised["busy_fraction"])
    least = min(1.0, low) - BUSY_SLACK
    if now.get("busy_high", now["busy_fraction"]) < least:
        yield (
            f"U is {now['busy_fraction']:.1%}, the lock file has "
            f"{min(1.0, promised['busy_fraction']):.1%} (at least {least:.1%})"
        )
    least = promised["samples_per_s"] * (1 - SPEED_SLACK) * _pace(promised, now)
    if now["samples_per_s"] < least:
        yield (
            f"{now['samples_per_s']:,.0f} samples/s, the lock file has "
            f"{promised['samples_per_s']:,.0f} (at least {least:,.0f})"
        )


def _pace(promised: Mapping[str, float], now: Mapping[str, float | None]) -> float:
    """Return the machine's speed now as a share of its speed then, at most 1; 1 if unknown."""
    was, is_now = promised.get("pace"), now.get("pace")
    return min(1.0, is_now / was) if was and is_now else 1.0


def slower(promised: Mapping[str, float], now: Mapping[str, float | None]) -> str:
    """Return a sentence about a machine that is slower than it was; empty if it is not."""
    share = _pace(promised, now)
    if share > 1 - SLOWER_SHARE:
        return ""
    return (
        f"The machine multiplies at {share:.0%} of the speed that it had when this was promised; the "
        "samples per second may be fewer in proportion."
    )
