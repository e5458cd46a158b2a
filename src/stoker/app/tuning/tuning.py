"""`stoker tune`: runs the search, writes its lock file and report, and checks a lock file."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any, TypeGuard

from stoker.app.experiment import Experiment
from stoker.app.tuned_settings import measured_code, value_at
from stoker.app.tuning.trials import TRIALS, Trials, cannot_measure, locked_folder
from stoker.cluster.devices import find_devices, hardware
from stoker.core.errors import CheckFailed, ConfigError, Plain
from stoker.core.files import write_atomic, write_json
from stoker.core.fingerprint import library_versions
from stoker.tune.check import Measured, broken, settled, slower
from stoker.tune.client import TrialClient, TrialLimits
from stoker.tune.compare import MIN_PAIRS, Load, watched_load
from stoker.tune.ledger import Ledger
from stoker.tune.lock import FILE, Lock, differing, read_lock, write_lock
from stoker.tune.process import TrialFailed
from stoker.tune.profile import Profile
from stoker.tune.report import report
from stoker.tune.search import Limits, Settings, Tuned, search


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """A tuning and its files."""

    tuned: Tuned
    lock: Path
    report: Path
    ledger: Path
    kept_lock: bool = False
    """Whether the lock file of an earlier tuning stays, because this tuning ended early without keeping a setting."""


def tune(
    experiment: Experiment,
    *,
    limits: Limits,
    log: Callable[[str, float], None],
    progress: Callable[[str], None],
) -> Tuning:
    """Tune an experiment, and write the lock file next to its `stoker.yaml`.

    Args:
        experiment: The experiment without the settings of an earlier lock file.
        limits: Limits of time, and the goal.
        log: Receives a line, and the seconds that are left.
        progress: Receives the progress of the stages before `train`.

    Raises:
        UserError: the experiment cannot be measured; its files are unchanged.
        BusyError: another process measures the experiment.
    """
    if experiment.train.elastic is not None:
        raise ConfigError(
            "`stoker tune` needs a step that does not depend on the number of workers",
            got=Plain("train.elastic"),
            fix="Tune with `--set train.elastic=null`, then copy the kept settings that do not change the batch.",
        )
    with locked_folder(experiment) as folder:
        trials = Trials(experiment, folder / TRIALS, progress=progress)
        names = (f"{number:02d}" for number in count(1))

        def open_trial(settings: Settings, left_s: float) -> TrialClient:
            within = TrialLimits.within(left_s, max_s=limits.lever_s)
            return trials.open(settings, name=next(names), limits=within)

        ledger = Ledger(folder / "ledger.jsonl")
        try:
            ledger.write("begin", _begin(experiment, limits))
            tuned = search(open_trial, ledger=ledger, limits=limits, log=log, watch=watched_load)
        except TrialFailed as failed:
            raise cannot_measure(failed) from None
        finally:
            ledger.close()
        result = Tuning(
            kept_lock=_keeps_lock(tuned, experiment.folder / FILE),
            tuned=tuned,
            lock=experiment.folder / FILE,
            report=folder / "report.html",
            ledger=ledger.path,
        )
        prices = experiment.resources.usd_per_hour
        write_json(folder / "tuned.json", as_json(tuned, usd_per_hour=prices))
        page = report(tuned, name=experiment.name, usd_per_hour=prices)
        write_atomic(result.report, page.encode(errors="backslashreplace"))
        # Written last, when the files to which the lock file refers are on the disk.
        if not result.kept_lock:
            write_lock(result.lock, _lock(experiment, tuned, folder))
    return result


def _keeps_lock(tuned: Tuned, lock: Path) -> bool:
    """Return whether to keep an earlier lock file: this tuning ended early and found no settings."""
    return not tuned.finished and not tuned.settings and os.path.lexists(lock)


def summary(profile: Profile, *, usd_per_hour: float | None) -> dict[str, Any]:
    """Return the figures of a profile that a lock file promises."""
    return {
        "busy_fraction": round(profile.busy_fraction, 4),
        "busy_low": round(profile.busy_low, 4),
        "busy_high": round(profile.busy_high, 4),
        "input_wait": round(profile.input_wait, 4),
        "samples_per_s": round(profile.samples_per_s, 1),
        "step_s": profile.split.step_s,
        "epoch_s": round(profile.epoch_s, 3),
        "pace": None if profile.pace is None else float(f"{profile.pace:.4g}"),
        "usd_per_epoch": None if usd_per_hour is None else profile.epoch_s * usd_per_hour / 3600,
    }


def as_json(tuned: Tuned, *, usd_per_hour: float | None) -> dict[str, Any]:
    """Return the result of a tuning as JSON values."""
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
        code=measured_code(experiment),
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
            "finished": tuned.finished,
            "ended": tuned.ended,
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


CHECK_S = 60.0
"""Maximum time of a check, seconds."""

PROMISED = {"busy_fraction": False, "samples_per_s": False, "busy_low": True, "pace": True}
"""Figure that the lock file promises -> whether it may be missing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """The figures that a lock file promises, and the figures measured now."""

    promised: dict[str, float]
    measured: dict[str, float]
    broken: tuple[str, ...]
    """One sentence for each figure that is no longer reached."""

    loads: tuple[Load | None, ...]
    """Load of other processes during each measurement."""

    not_quiet: str
    """A sentence about the load; empty if the machine was quiet."""

    slower: str
    """A sentence saying that the machine is slower than it was during the tuning; empty if it is not."""


def check(experiment: Experiment, *, progress: Callable[[str], None]) -> Check:
    """Measure again the figures that the lock file promises.

    Args:
        experiment: The experiment with the settings of the lock file.
        progress: Receives the progress of the stages before `train`.

    Raises:
        ConfigError: the lock file is missing, or was measured on another machine or with another model.
        CheckFailed: the experiment cannot be measured within `CHECK_S`.
        UserError: the experiment cannot be measured.
    """
    lock = _checkable(experiment)
    promised = {name: value for name, value in lock.after.items() if _is_number(value)}
    with locked_folder(experiment) as folder:
        trials = Trials(experiment, folder / TRIALS, progress=progress)

        def measure(within_s: float) -> Measured:
            with trials.alone(name="check", within_s=within_s) as trial:
                with watched_load(trial.pid) as load:
                    # All processes share one minute, so each measures as few pairs as possible.
                    profile = trial.profile(max_pairs=MIN_PAIRS)
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
        slower=slower(promised, now.figures),
    )


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
        # The lock file's settings would not be used, so the measurement would not be comparable.
        raise ConfigError(
            f"the experiment must still use the functions that {FILE} was measured with: {', '.join(gone)}",
            got=Plain(", ".join(code)),
            fix="Run `stoker tune` again.",
        )
    for name, optional in PROMISED.items():
        value = lock.after.get(name)
        if not (_is_number(value) or (optional and value is None)):
            # A check against NaN could not fail, because no figure is less than NaN.
            raise ConfigError(
                f"after.{name} in {FILE} must be a number of 0 or more",
                got=value,
                fix="Run `stoker tune` again.",
            )
    return lock


def _is_number(value: object) -> TypeGuard[float]:
    if isinstance(value, bool) or not isinstance(value, float | int):
        return False
    return math.isfinite(value) and value >= 0
