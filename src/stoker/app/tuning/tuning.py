"""`stoker tune`: the search over trials, the lock file and the report that it leaves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

from stoker.app.experiment import Experiment
from stoker.app.tuned_settings import measured_code, value_at
from stoker.app.tuning.trials import TRIALS, Trials, cannot_measure, locked_folder
from stoker.cluster.devices import find_devices, hardware
from stoker.core.files import write_atomic, write_json
from stoker.core.fingerprint import library_versions
from stoker.tune.client import TrialClient, TrialLimits
from stoker.tune.compare import watched_load
from stoker.tune.ledger import Ledger
from stoker.tune.lock import FILE, Lock, write_lock
from stoker.tune.process import TrialFailed
from stoker.tune.profile import Profile
from stoker.tune.report import report
from stoker.tune.search import Limits, Settings, Tuned, search


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """A tuning and what it left."""

    tuned: Tuned
    lock: Path
    report: Path
    ledger: Path
    kept_lock: bool = False
    """The lock file is an earlier tuning's still: this one ended early, and had kept nothing."""


def tune(
    experiment: Experiment,
    *,
    limits: Limits,
    log: Callable[[str, float], None],
    progress: Callable[[str], None],
) -> Tuning:
    """Tune an experiment, as `stoker.yaml` has it, and write the lock file beside it.

    Args:
        experiment: Without what an earlier lock says.
        limits: What it may take.
        log: Told what goes on, and how many seconds are left.
        progress: Told how far a process is that gets ready.

    Raises:
        UserError: the experiment cannot be measured; it stays as it was.
        BusyError: it is being tuned already.
    """
    with locked_folder(experiment) as folder:
        trials = Trials(experiment, folder / TRIALS, progress=progress)
        names = (f"{number:02d}" for number in count(1))

        def open_trial(settings: Settings, left_s: float) -> TrialClient:
            within = TrialLimits.within(left_s, most_s=limits.lever_s)
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
            kept_lock=_stays(tuned, experiment.folder / FILE),
            tuned=tuned,
            lock=experiment.folder / FILE,
            report=folder / "report.html",
            ledger=ledger.path,
        )
        prices = experiment.resources.usd_per_hour
        write_json(folder / "tuned.json", as_json(tuned, usd_per_hour=prices))
        page = report(tuned, name=experiment.name, usd_per_hour=prices)
        write_atomic(result.report, page.encode(errors="backslashreplace"))
        # Last: what it stands on is on the disk.
        if not result.kept_lock:
            write_lock(result.lock, _lock(experiment, tuned, folder))
    return result


def _stays(tuned: Tuned, lock: Path) -> bool:
    """Whether an earlier lock says more: this tuning ended early, and had found nothing by then."""
    return not tuned.finished and not tuned.settings and os.path.lexists(lock)


def summary(profile: Profile, *, usd_per_hour: float | None) -> dict[str, Any]:
    """The figures of a profile that a promise is made of."""
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
