"""`stoker tune` and its check: the search over trials, the lock file and the report that it leaves."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from stoker.app.bench import TrialBench, one_bench
from stoker.app.experiment import Experiment
from stoker.app.identity import code_fingerprints
from stoker.app.locked import value_at
from stoker.cluster.devices import find_devices, hardware
from stoker.core.errors import BusyError, CheckFailed, ConfigError, Plain, UserError
from stoker.core.files import write_atomic, write_json
from stoker.core.fingerprint import library_versions
from stoker.tune.ledger import Ledger
from stoker.tune.lock import FILE, Lock, differing, read_lock, write_lock
from stoker.tune.process import TrialFailed
from stoker.tune.profile import Profile
from stoker.tune.report import report
from stoker.tune.search import Limits, Settings, Tuned, search

CHECK_S = 60.0
"""Longest that a check takes."""

BUSY_SLACK = 0.05
"""How much lower the busy fraction may be than the lowest that was seen when it was promised."""

CHECKS = 3
"""Processes that measure before a promise is called broken."""

SPEED_SLACK = 0.2
"""By which share samples a second may be fewer: the same machine is that much slower at times."""


_ROOM = 1.5
"""How many times what the first process took must be left for another one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """A tuning and what it left."""

    tuned: Tuned
    lock: Path
    report: Path
    ledger: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """What a lock file promises, and what was measured now."""

    promised: dict[str, float]
    measured: dict[str, float]
    broken: tuple[str, ...]
    """What does not hold; empty: all does."""


def tune(
    experiment: Experiment,
    *,
    limits: Limits,
    tell: Callable[[str, float], None],
    progress: Callable[[str], None],
) -> Tuning:
    """Tune an experiment, as `stoker.yaml` has it, and write the lock file beside it.

    Args:
        experiment: Without what an earlier lock says.
        limits: What it may take.
        tell: Told what goes on, and how many seconds are left.
        progress: Told how far a process is that gets ready.

    Raises:
        UserError: the experiment cannot be measured; it stays as it was.
        BusyError: it is being tuned already.
    """
    with alone(experiment) as folder:
        names = count(1)

        def open_bench(settings: Settings, left_s: float) -> TrialBench:
            end_s = time.monotonic() + left_s
            return TrialBench(
                experiment,
                settings,
                folder=folder / "trials",
                name=f"{next(names):02d}",
                left_s=lambda: end_s - time.monotonic(),
                most_s=limits.lever_s,
                tell=progress,
            )

        ledger = Ledger(folder / "ledger.jsonl")
        try:
            ledger.write("begin", _begin(experiment, limits))
            tuned = search(open_bench, ledger=ledger, limits=limits, tell=tell)
        except TrialFailed as failed:
            raise cannot(failed, "--budget") from None
        finally:
            ledger.close()
        result = Tuning(
            tuned=tuned,
            lock=experiment.folder / FILE,
            report=folder / "report.html",
            ledger=ledger.path,
        )
        prices = experiment.resources.usd_per_hour
        write_json(folder / "tuned.json", as_json(tuned, usd_per_hour=prices))
        write_atomic(result.report, report(tuned, name=experiment.name, usd_per_hour=prices))
        # Last: what it stands on is on the disk.
        write_lock(result.lock, _lock(experiment, tuned, folder))
    return result


def check(experiment: Experiment, *, tell: Callable[[str], None]) -> Check:
    """Measure again what the lock file promises.

    Args:
        experiment: With what the lock says.
        tell: Told what goes on.

    Raises:
        ConfigError: there is no lock file, or it is another machine's.
        CheckFailed: it cannot be measured within `CHECK_S`.
        UserError: the experiment cannot be measured.
    """
    lock = _checkable(experiment)
    promised = {name: value for name, value in lock.after.items() if value is not None}
    with alone(experiment) as folder:
        trials = folder / "trials"

        def measure(within_s: float) -> dict[str, Any]:
            with one_bench(
                experiment, folder=trials, name="check", within_s=within_s, tell=tell
            ) as bench:
                return summary(bench.profile(), usd_per_hour=experiment.resources.usd_per_hour)

        try:
            now = settled(measure, promised, within_s=CHECK_S)
        except TrialFailed as failed:
            if failed.kind != "budget":
                raise cannot(failed, "--budget") from None
            raise CheckFailed(
                f"a check must be over in {CHECK_S:.0f} s", got=Plain(failed.text)
            ) from None
    return Check(promised=promised, measured=now, broken=tuple(broken(promised, now)))


def settled(
    measure: Callable[[float], dict[str, Any]], promised: Mapping[str, float], *, within_s: float
) -> dict[str, Any]:
    """Measure once where that holds what was promised, else as often as there is time for.

    A process may be some per cent quicker or slower than the next one with the same code, so that
    one alone says nothing against a promise.

    Args:
        measure: A process of its own, which may take so many seconds.
        promised: Name -> figure.
        within_s: How long all of it may take.

    Returns:
        Name -> the median of what was measured.

    Raises:
        TrialFailed: the first one did not end in time, or any could not be measured.
    """
    began_s = time.monotonic()
    found = [measure(within_s)]
    longest_s = time.monotonic() - began_s
    while len(found) < CHECKS and any(broken(promised, found[0])):
        left_s = began_s + within_s - time.monotonic()
        if left_s < _ROOM * longest_s:
            break
        found.append(measure(left_s))
    return {
        name: None if value is None else statistics.median(each[name] for each in found)
        for name, value in found[0].items()
    }


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
    return lock


def broken(promised: Mapping[str, float], now: Mapping[str, float]) -> Iterator[str]:
    """What of a promise does not hold, in a sentence each."""
    # No device is busy for more than all of the time: what was measured above that was noise.
    # And of some pairs of windows the lowest is as true as the median that is shown.
    seen = promised.get("busy_low", promised["busy_fraction"])
    least = min(1.0, seen) - BUSY_SLACK
    if now["busy_fraction"] < least:
        yield (
            f"U is {now['busy_fraction']:.1%}, promised were {promised['busy_fraction']:.1%} "
            f"(at least {least:.1%})"
        )
    least = promised["samples_per_s"] * (1 - SPEED_SLACK)
    if now["samples_per_s"] < least:
        yield (
            f"{now['samples_per_s']:,.0f} samples/s, promised were "
            f"{promised['samples_per_s']:,.0f} (at least {least:,.0f})"
        )


def summary(profile: Profile, *, usd_per_hour: float | None) -> dict[str, Any]:
    """The figures of a profile that a promise is made of."""
    return {
        "busy_fraction": round(profile.busy_fraction, 4),
        "busy_low": round(profile.busy_low, 4),
        "input_wait": round(profile.input_wait, 4),
        "samples_per_s": round(profile.samples_per_s, 1),
        "step_s": profile.split.step_s,
        "epoch_s": round(profile.epoch_s, 3),
        "usd_per_epoch": None if usd_per_hour is None else profile.epoch_s * usd_per_hour / 3600,
    }


def as_json(tuned: Tuned, *, usd_per_hour: float | None) -> dict[str, Any]:
    """What was found, JSON values."""
    return asdict(tuned) | {
        "before": tuned.before.to_json() | summary(tuned.before, usd_per_hour=usd_per_hour),
        "after": tuned.after.to_json() | summary(tuned.after, usd_per_hour=usd_per_hour),
    }


def _lock(experiment: Experiment, tuned: Tuned, folder: Path) -> Lock:
    values, price = experiment.to_json(), experiment.resources.usd_per_hour
    kept = [outcome for outcome in tuned.outcomes if outcome.decision == "kept"]
    return Lock(
        settings=dict(tuned.settings),
        replaced={name: value_at(values, name) for name in tuned.settings},
        hardware=hardware(find_devices()),
        code=code_fingerprints(experiment),
        gains=[
            {"lever": each.lever, "settings": each.settings}
            | {"ratio": round(each.gain.ratio, 4)}
            | {"low": round(each.gain.low, 4), "high": round(each.gain.high, 4)}
            for each in kept
        ],
        before=summary(tuned.before, usd_per_hour=price),
        after=summary(tuned.after, usd_per_hour=price),
        tuned={
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "took_s": round(tuned.took_s, 1),
            "versions": library_versions(),
            "ledger": os.path.relpath(folder / "ledger.jsonl", experiment.folder),
        },
    )


def _begin(experiment: Experiment, limits: Limits) -> dict[str, Any]:
    return {
        "experiment": json.loads(json.dumps(experiment.to_json(), default=str)),
        "limits": asdict(limits),
        "hardware": hardware(find_devices()),
        "versions": library_versions(),
    }


def cannot(failed: TrialFailed, option: str) -> UserError:
    """Why an experiment could not be measured as it is.

    Args:
        failed: What its trial said.
        option: What gives it more time.
    """
    if failed.kind == "budget":
        return ConfigError(
            f"{option} must be long enough to measure the experiment as it is",
            got=Plain(failed.text),
            fix=f"Give it more, e.g. {option} 10m.",
        )
    return UserError(
        "an experiment that is measured must train as it is",
        got=Plain(f"{failed.kind}: {failed.text}"),
        fix="`stoker train` says more.",
    )


@contextmanager
def alone(experiment: Experiment) -> Iterator[Path]:
    """A folder for one tuning; two at once would measure each other."""
    root = experiment.folder / experiment.runs / ".tune" / experiment.name
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"{experiment.name} is measured by one process at a time",
                got=Plain(f"another holds {root / 'lock'}"),
                fix="Wait until it has ended.",
            ) from None
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
        folder = root / name
        folder.mkdir()
        yield folder
