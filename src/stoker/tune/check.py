"""`stoker tune --check`: checks whether the lock file's figures still hold, on a quiet machine if possible."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stoker.tune.compare import Load

BUSY_SLACK = 0.05
"""How far the interval of the busy fraction may be below the interval in the lock file."""

SPEED_SLACK = 0.2
"""Share by which samples per second may be below the lock file's, after correction for the machine's speed."""

CHECKS = 3
"""Number of measurements on a quiet machine after which a figure of the lock file may count as broken."""

MAX_CHECKS = 6
"""Maximum number of measurements: if the machine is busy, it may be quiet for a later one."""

SLOWER_SHARE = 0.05
"""A machine that has become slower by at least this share is reported."""

_TIME_FACTOR = 1.5
"""Another measurement begins only if the remaining time is this many times the first one's duration."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The measurement of one process."""

    figures: dict[str, Any]
    """Name in the lock file -> measured figure."""

    load: Load | None = None
    """Load of other processes during the measurement; None if unknown."""

    @property
    def is_quiet(self) -> bool:
        """Whether the load of other processes was small, or is unknown."""
        return self.load is None or self.load.is_quiet


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """The result of one or more measurements."""

    figures: dict[str, Any]
    """Name -> median over the measurements on a quiet machine; over all if none was quiet."""

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
            return f"{text}; only the other measurements count."
        return f"{text}. Run the check again when nothing else runs."


def settled(
    measure: Callable[[float], Measured], recorded: Mapping[str, float], *, within_s: float
) -> Settled:
    """Measure once if that confirms the lock file's figures; otherwise repeat the measurement.

    This ends after `CHECKS` quiet or `MAX_CHECKS` measurements, or when the time does not suffice for another one.
    Processes with the same code differ by some percent, so one slow measurement disproves nothing. A measurement
    that other programs disturbed does not count if there is a quiet one.

    Args:
        measure: Measures in a new process, within this number of seconds.
        recorded: Name in the lock file -> recorded figure.
        within_s: Maximum time for all measurements, seconds.

    Raises:
        TrialFailed: a process could not measure, or did not end in time.
    """
    began_s = time.monotonic()
    found = [measure(within_s)]
    longest_s = time.monotonic() - began_s
    while any(broken(recorded, found[0].figures)) and not _is_enough(found):
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


def broken(recorded: Mapping[str, float], now: Mapping[str, float]) -> Iterator[str]:
    """Yield a clause for each figure of the lock file that does not hold."""
    # A device cannot be busy for more than 100 % of the time: a recorded value above 1 was noise. Any
    # value of an interval may be the true one, so U fails to hold only if its new interval is below the
    # recorded one.
    low = recorded.get("busy_low", recorded["busy_fraction"])
    least = min(1.0, low) - BUSY_SLACK
    if now.get("busy_high", now["busy_fraction"]) < least:
        yield (
            f"U is {now['busy_fraction']:.1%}, the lock file has "
            f"{min(1.0, recorded['busy_fraction']):.1%} (at least {least:.1%})"
        )
    least = recorded["samples_per_s"] * (1 - SPEED_SLACK) * _pace(recorded, now)
    if now["samples_per_s"] < least:
        yield (
            f"{now['samples_per_s']:,.0f} samples/s, the lock file has "
            f"{recorded['samples_per_s']:,.0f} (at least {least:,.0f})"
        )


def _pace(recorded: Mapping[str, float], now: Mapping[str, float | None]) -> float:
    """Return the machine's speed as a share of its recorded speed, at most 1; 1 if unknown."""
    was, is_now = recorded.get("pace"), now.get("pace")
    return min(1.0, is_now / was) if was and is_now else 1.0


def slower(recorded: Mapping[str, float], now: Mapping[str, float | None]) -> str:
    """Return a sentence if the machine is slower than during the tuning; else an empty string."""
    share = _pace(recorded, now)
    if share > 1 - SLOWER_SHARE:
        return ""
    return (
        f"The machine multiplies matrices at {share:.0%} of its speed during the tuning, so "
        "proportionally fewer samples per second are accepted."
    )
