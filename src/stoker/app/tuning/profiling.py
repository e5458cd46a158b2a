"""`stoker profile EXPERIMENT`: measures a training, and writes findings and plots; changes no setting."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from stoker.app.experiment import Experiment
from stoker.app.tuning.trials import TRIALS, Trials, cannot_measure, locked_folder
from stoker.core.errors import Finding
from stoker.core.files import write_atomic, write_json
from stoker.measure.device_time import DeviceTime
from stoker.measure.findings import DeviceFinding, StepFacts, device_finding, nhwc_is_allowed
from stoker.train.config import ResolvedTraining
from stoker.tune.compare import Gain
from stoker.tune.process import TrialFailed
from stoker.tune.profile import Profile, diagnose
from stoker.tune.report import ProfileReport, mfu, profile_page


def profile(
    experiment: Experiment,
    *,
    log: Callable[[str], None],
    progress: Callable[[str], None],
    budget_s: float = 300.0,
) -> ProfileReport:
    """Measure the training of an experiment with its own settings.

    Args:
        experiment: The experiment, with the settings of its lock file if they apply.
        log: Receives lines for the user.
        progress: Receives the progress of the stages before `train`.
        budget_s: Maximum time for all measurements, seconds.

    Raises:
        UserError: the experiment cannot be measured.
        BusyError: another process measures the experiment.
    """
    with locked_folder(experiment) as folder:
        trials = Trials(experiment, folder / TRIALS, progress=progress)
        try:
            with trials.alone(name="profile", within_s=budget_s) as trial:
                log("measuring")
                measured, details = trial.profile(), trial.explain()
                log("the same step in another precision")
                precision = _in_time(trial.other_precision)
                resolved = trial.situation.resolved
        except TrialFailed as failed:
            raise cannot_measure(failed) from None
        found = _report(experiment, measured, details, precision, resolved, folder)
        write_atomic(found.page, profile_page(found, experiment.name))
        write_json(found.json, found.to_json())
    return found


def _report(
    experiment: Experiment,
    measured: Profile,
    details: dict[str, Any],
    precision: tuple[str, Gain] | None,
    resolved: ResolvedTraining,
    folder: Path,
) -> ProfileReport:
    machine = details["machine"] | mfu(details["machine"], measured)
    traced = details["device"]
    device = DeviceTime.from_json(traced["time"]) if "time" in traced else None
    return ProfileReport(
        profile=measured,
        diagnosis=diagnose(
            measured,
            own_dataset=experiment.own_dataset is not None,
            other_precision=precision,
        ),
        precision=precision,
        machine=machine,
        stages=details["stages"],
        calls=details["calls"],
        findings=[Finding(**each) for each in details["findings"]],
        device=device,
        device_finding=_device_finding(device, measured, resolved, machine["mfu"]),
        no_device=traced["why"],
        page=folder / "profile.html",
        json=folder / "profile.json",
    )


def _device_finding(
    device: DeviceTime | None, measured: Profile, resolved: ResolvedTraining, mfu: float | None
) -> DeviceFinding | None:
    if device is None:
        return None
    facts = StepFacts(
        of_script=False,
        mfu=mfu,
        precision=resolved.precision,
        xla=resolved.xla,
        steps_per_call=measured.steps_per_call,
        input_wait=measured.input_wait,
        nhwc_allowed=nhwc_is_allowed(),
    )
    return device_finding(device, facts)


def _in_time(measure: Callable[[], tuple[str, Gain]]) -> tuple[str, Gain] | None:
    """Return the result of the last measurement; None if time ran out: the earlier measurements remain valid."""
    try:
        return measure()
    except TrialFailed as failed:
        if failed.kind != "budget":
            raise
        return None
