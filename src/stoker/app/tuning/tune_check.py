"""`stoker tune --check`: is what the lock file promises still so, and was the machine quiet enough to say?"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from stoker.app.experiment import Experiment
from stoker.app.tuned_settings import measured_code
from stoker.app.tuning.trials import TRIALS, Trials, cannot_measure, locked_folder
from stoker.app.tuning.tuning import summary
from stoker.cluster.devices import find_devices, hardware
from stoker.core.errors import CheckFailed, ConfigError, Plain
from stoker.tune.compare import PAIRS_LEAST, Load, watched_load
from stoker.tune.lock import FILE, Lock, differing, read_lock
from stoker.tune.process import TrialFailed

CHECK_S = 60.0
"""Longest that a check takes."""

BUSY_SLACK = 0.05
"""How far the interval of the busy fraction may lie below that of the promise."""

CHECKS = 3
"""Processes that measure on a quiet machine before a promise is called broken."""

MOST_CHECKS = 6
"""Processes that measure where the machine is not quiet: a later one may find it so."""

SPEED_SLACK = 0.2
"""By which share samples a second may be fewer, at the pace that the machine had."""

PROMISED = {"busy_fraction": False, "samples_per_s": False, "busy_low": True, "pace": True}
"""What a promise is about; whether it may be left out."""

PACE_SAID = 0.05
"""By which share a machine must be slower at what does not depend on the training for that to be said."""

_ROOM = 1.5
"""How many times what the first process took must be left for another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What one process found."""

    figures: dict[str, Any]
    """Name -> figure, as the lock file has them."""

    load: Load | None = None
    """What others took of the cores meanwhile; None where that is not known."""

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is known against it."""
        return self.load is None or self.load.is_quiet


@dataclass(frozen=True, kw_only=True, slots=True)
class Settled:
    """What is measured, all processes together."""

    figures: dict[str, Any]
    """Name -> the median over the processes that found the machine quiet; over all where none did."""

    loads: tuple[Load | None, ...]
    """Of each process, in their order."""

    def not_quiet(self) -> str:
        """What others took meanwhile, a sentence; "" where all found the machine quiet."""
        loaded = [load for load in self.loads if load is not None and not load.is_quiet]
        if not loaded:
            return ""
        worst = max(loaded, key=lambda load: load.others)
        count = f"{len(loaded)} of {len(self.loads)} measurements"
        said = f"The machine was not quiet: {worst.text()} during {count}"
        if len(loaded) < len(self.loads):
            return f"{said}; the others decide."
        return f"{said}. Run the check again when nothing else runs."


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What a lock file promises, and what was measured now."""

    promised: dict[str, float]
    measured: dict[str, float]
    broken: tuple[str, ...]
    """What does not hold; empty: all does."""

    loads: tuple[Load | None, ...]
    """What others took of the cores, process by process."""

    not_quiet: str
    """A sentence about that; "" where the machine was quiet."""

    slower: str
    """A sentence about a machine that is slower than it was; "" where it is not."""


def check(experiment: Experiment, *, progress: Callable[[str], None]) -> Check:
    """Measure again what the lock file promises.

    Args:
        experiment: With what the lock says.
        progress: Told what goes on.

    Raises:
        ConfigError: there is no lock file, or it is another machine's or another model's.
        CheckFailed: it cannot be measured within `CHECK_S`.
        UserError: the experiment cannot be measured.
    """
    lock = _checkable(experiment)
    promised = {name: value for name, value in lock.after.items() if _is_number(value)}
    with locked_folder(experiment) as folder:
        trials = Trials(experiment, folder / TRIALS, progress=progress)

        def measure(within_s: float) -> Measured:
            with trials.alone(name="check", within_s=within_s) as trial:
                with watched_load(trial.pid) as load:
                    # All processes share a minute, so each measures as few pairs as it can.
                    profile = trial.profile(most_pairs=PAIRS_LEAST)
                prices = experiment.resources.usd_per_hour
                return Measured(figures=summary(profile, usd_per_hour=prices), load=load())

        try:
            now = settled(measure, promised, within_s=CHECK_S)
        except TrialFailed as failed:
            if failed.kind != "budget":
                raise cannot_measure(failed) from None
            raise CheckFailed(
                f"a check must be over in {CHECK_S:.0f} s", got=Plain(failed.text)
            ) from None
    return Check(
        promised=promised,
        measured=now.figures,
        broken=tuple(broken(promised, now.figures)),
        loads=now.loads,
        not_quiet=now.not_quiet(),
        slower=_slower(promised, now.figures),
    )


def settled(
    measure: Callable[[float], Measured], promised: Mapping[str, float], *, within_s: float
) -> Settled:
    """Measure once where that holds what was promised, else as often as there is time for.

    A process may be some per cent quicker or slower than the next one with the same code, so that
    one alone says nothing against a promise; and one that shared its cores says nothing where
    another had them for itself.

    Args:
        measure: A process of its own, which may take so many seconds.
        promised: Name -> figure.
        within_s: How long all of it may take.

    Raises:
        TrialFailed: the first one did not end in time, or any could not be measured.
    """
    began_s = time.monotonic()
    found = [measure(within_s)]
    longest_s = time.monotonic() - began_s
    while any(broken(promised, found[0].figures)) and not _enough(found):
        left_s = began_s + within_s - time.monotonic()
        if left_s < _ROOM * longest_s:
            break
        found.append(measure(left_s))
    judged = [each.figures for each in found if each.is_quiet] or [each.figures for each in found]
    figures = {
        name: None if value is None else statistics.median(each[name] for each in judged)
        for name, value in judged[0].items()
    }
    return Settled(figures=figures, loads=tuple(each.load for each in found))


def _enough(found: Sequence[Measured]) -> bool:
    return len(found) >= MOST_CHECKS or sum(each.is_quiet for each in found) >= CHECKS


def _checkable(experiment: Experiment) -> Lock:
    lock = read_lock(experiment.folder / FILE)
    if lock is None:
        raise ConfigError(
            "a check needs a lock file", got=Plain(f"no {FILE}"), fix="Run `stoker tune` first."
        )
    if others := differing(lock.hardware, hardware(find_devices())):
        raise ConfigError(
            f"a check needs the machine that {FILE} was measured on",
            got=Plain("; ".join(others)),
            fix="Run `stoker tune` here.",
        )
    code = measured_code(experiment)
    if gone := [name for name in lock.code if name not in code]:
        # Its settings are not used here: what is measured would not be what was promised.
        raise ConfigError(
            f"a check needs the experiment that {FILE} was measured with: {', '.join(gone)}",
            got=Plain(", ".join(code)),
            fix="Run `stoker tune` again.",
        )
    for name, optional in PROMISED.items():
        value = lock.after.get(name)
        if not (_is_number(value) or (optional and value is None)):
            # Nothing is ever less than what is no number: such a promise could not be broken.
            raise ConfigError(
                f"{FILE} must promise after.{name}, a number of 0 or more",
                got=value,
                fix="Run `stoker tune` again.",
            )
    return lock


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, float | int):
        return False
    return math.isfinite(value) and value >= 0


def broken(promised: Mapping[str, float], now: Mapping[str, float]) -> Iterator[str]:
    """What of a promise does not hold, in a sentence each."""
    # No device is busy for more than all of the time: what was measured above that was noise.
    # And all of an interval is as true as the median that is shown: only one that lies below the
    # other breaks a promise.
    seen = promised.get("busy_low", promised["busy_fraction"])
    least = min(1.0, seen) - BUSY_SLACK
    if now.get("busy_high", now["busy_fraction"]) < least:
        yield (
            f"U is {now['busy_fraction']:.1%}, promised were "
            f"{min(1.0, promised['busy_fraction']):.1%} (at least {least:.1%})"
        )
    least = promised["samples_per_s"] * (1 - SPEED_SLACK) * _pace(promised, now)
    if now["samples_per_s"] < least:
        yield (
            f"{now['samples_per_s']:,.0f} samples/s, promised were "
            f"{promised['samples_per_s']:,.0f} (at least {least:,.0f})"
        )


def _pace(promised: Mapping[str, float], now: Mapping[str, float | None]) -> float:
    """Which share of the pace that it had the machine still has: 1 at most, and where nobody knows."""
    was, is_now = promised.get("pace"), now.get("pace")
    return min(1.0, is_now / was) if was and is_now else 1.0


def _slower(promised: Mapping[str, float], now: Mapping[str, float | None]) -> str:
    share = _pace(promised, now)
    if share > 1 - PACE_SAID:
        return ""
    return (
        f"The machine multiplies at {share:.0%} of the pace that it had when this was promised: by "
        "so much fewer samples a second are no break."
    )
