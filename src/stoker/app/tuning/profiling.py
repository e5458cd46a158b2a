"""`stoker profile EXPERIMENT`: one training measured, explained and drawn; nothing is changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stoker.app.experiment import Experiment
from stoker.app.trial.client import one_bench
from stoker.app.tuning.tuning import TRIALS, alone, cannot
from stoker.core.files import write_atomic, write_json
from stoker.core.finding import Finding
from stoker.measure.device_page import device_section, finding_section
from stoker.measure.device_time import DeviceTime
from stoker.measure.findings import DeviceFinding, StepFacts, device_finding, nhwc_is_allowed
from stoker.pages.bars import Span, timeline
from stoker.pages.html import page, paragraph, section
from stoker.pages.numbers import percent, seconds
from stoker.pages.table import Number, facts, table
from stoker.tune.compare import Gain
from stoker.tune.diagnosis import Diagnosis, diagnose
from stoker.tune.process import TrialFailed
from stoker.tune.profile import Profile
from stoker.tune.report import parts_of_a_step


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiled:
    """What was measured, and where it is written."""

    profile: Profile
    diagnosis: Diagnosis
    precision: tuple[str, Gain] | None
    """Another precision, and how much faster the step in memory is in it; None where there was no
    time for it."""

    machine: dict[str, Any]
    """Model's operations, device's peak, memory, GPUs."""

    stages: list[dict[str, Any]]
    """Of the input: name, CPU seconds a sample, share."""

    calls: list[dict[str, Any]]
    """Of the timeline."""

    findings: list[Finding] = field(default_factory=list)
    """Avoidable costs in the model itself."""

    device: DeviceTime | None = None
    """Device time by kernel class; None without a GPU."""

    device_finding: DeviceFinding | None = None
    """The most expensive kernel class, if its share is large."""

    no_device: str = ""
    """Why `device` is missing although there is a GPU."""

    page: Path
    json: Path

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        other = None
        if self.precision is not None:
            precision, gain = self.precision
            other = {"precision": precision} | asdict(gain)
        return {
            **self.profile.to_json(),
            "diagnosis": asdict(self.diagnosis),
            "other_precision": other,
            "machine": self.machine,
            "stages": self.stages,
            "calls": self.calls,
            "findings": [asdict(finding) for finding in self.findings],
            "device_time": None if self.device is None else self.device.to_json(),
            "device_time_not_measured": self.no_device,
            "device_finding": None
            if self.device_finding is None
            else self.device_finding.to_json(),
            "page": str(self.page),
        }


def profile(
    experiment: Experiment,
    *,
    log: Callable[[str], None],
    progress: Callable[[str], None],
    budget_s: float = 300.0,
) -> Profiled:
    """Measure an experiment's training as it is set.

    Args:
        experiment: With what a lock file says, where that is used.
        log: Told what goes on.
        progress: Told how far the process is that gets ready.
        budget_s: Longest that it may take once the data is there, seconds.

    Raises:
        UserError: it cannot be measured.
        BusyError: it is being measured already.
    """
    with alone(experiment) as folder:
        try:
            with one_bench(
                experiment,
                folder=folder / TRIALS,
                name="profile",
                within_s=budget_s,
                tell=progress,
            ) as bench:
                log("measuring")
                measured = bench.profile()
                calls, stages = bench.timeline(), bench.stages()
                machine = bench.machine()
                findings = bench.findings()
                traced = bench.device()
                resolved = bench.prepared["resolved"]
                log("the same step in another precision")
                precision = _in_time(bench.other_precision)
        except TrialFailed as failed:
            raise cannot(failed, "--budget") from None
        machine |= mfu(machine, measured)
        device = DeviceTime.from_json(traced["time"]) if "time" in traced else None
        found = Profiled(
            profile=measured,
            diagnosis=diagnose(
                measured,
                own_dataset=experiment.own_dataset is not None,
                other_precision=precision,
            ),
            precision=precision,
            machine=machine,
            stages=stages,
            calls=calls,
            findings=findings,
            device=device,
            device_finding=_device_finding(device, measured, resolved, machine["mfu"]),
            no_device=traced["why"],
            page=folder / "profile.html",
            json=folder / "profile.json",
        )
        write_atomic(found.page, page_of(found, experiment.name))
        write_json(found.json, found.to_json())
    return found


def _device_finding(
    device: DeviceTime | None, measured: Profile, resolved: dict[str, Any], mfu: float | None
) -> DeviceFinding | None:
    if device is None:
        return None
    facts = StepFacts(
        of_script=False,
        mfu=mfu,
        precision=resolved["precision"],
        xla=resolved["xla"],
        steps_per_call=measured.steps_per_call,
        input_wait=measured.input_wait,
        nhwc_allowed=nhwc_is_allowed(),
    )
    return device_finding(device, facts)


def _in_time(asked: Callable[[], tuple[str, Gain]]) -> tuple[str, Gain] | None:
    """What comes last: all that was measured before stands without it."""
    try:
        return asked()
    except TrialFailed as failed:
        if failed.kind != "budget":
            raise
        return None


def mfu(machine: dict[str, Any], measured: Profile) -> dict[str, Any]:
    """Model FLOP utilisation: achieved by peak, as measured in training; None where unknown."""
    flops, peak = machine.get("step_flops_per_sample"), machine.get("peak_flops_per_s")
    if not flops or not peak:
        return {"achieved_flops_per_s": None, "mfu": None}
    achieved = flops * measured.samples_per_s
    return {"achieved_flops_per_s": achieved, "mfu": achieved / peak}


def rows_of(found: Profiled) -> list[tuple[str, str]]:
    """What a person is told, in a table."""
    measured, machine = found.profile, found.machine
    rows = [
        (
            "U, busy fraction",
            f"{measured.busy_fraction:.1%}  ({measured.busy_low:.1%} to {measured.busy_high:.1%})",
        ),
        ("W, input wait", f"{measured.input_wait:.1%}"),
        ("samples a second", f"{measured.samples_per_s:,.0f}"),
        ("a step", f"{seconds(measured.split.step_s)}, {measured.rows_a_step:.0f} samples"),
        ("an epoch's steps", seconds(measured.epoch_s)),
        ("input", f"{seconds(measured.input_cpu_s_per_sample)} of CPU a sample"),
        ("memory", f"{machine['peak_memory_bytes'] / 2**30:.2f} GiB, the process's peak"),
    ]
    if machine.get("mfu") is not None:
        achieved, peak = machine["achieved_flops_per_s"] / 1e9, machine["peak_flops_per_s"] / 1e9
        said = f"{machine['mfu']:.1%}: {achieved:.3g} of {peak:.3g} GFLOP/s that "
        rows.append(("MFU", f"{said}{machine['peak_of']} reach"))
    if found.precision is None:
        rows.append(("another precision", "not measured: the budget was used up"))
    return rows + [(f"GPU {gpu['index']}", _gpu(gpu)) for gpu in machine["gpus"]]


def _gpu(gpu: dict[str, Any]) -> str:
    busy, used = f"{gpu['utilization']:.0%} busy", f"{gpu['used_bytes'] / 2**30:.1f} GiB"
    return f"{busy}, {used}, {gpu['power_w']:.0f} W, {gpu['clock_mhz']:.0f} MHz"


def page_of(found: Profiled, name: str) -> str:
    """The page of a profile, HTML."""
    measured = found.profile
    return page(
        f"Profile of {name}",
        [
            finding_section(found.device_finding),
            paragraph(found.diagnosis.text),
            *(paragraph(finding.line()) for finding in found.findings),
            section("Figures", facts(rows_of(found))),
            device_section(found.device, why=found.no_device),
            section(
                "Where a step's time goes",
                parts_of_a_step(measured.split, title="parts of a step, a waterfall"),
            ),
            section(
                "Calls, one after the other",
                timeline(list(_spans(found.calls)), lanes=LANES, title="calls of training"),
            ),
            section(
                "What a sample costs, stage by stage",
                table(["stage", Number("CPU a sample"), Number("share")], map(_stage, found.stages))
                or paragraph("Nothing: all samples are in memory, ready for training."),
            ),
        ],
    )


LANES = ("a call", "waits for input")
"""Of the timeline; a gap in the first is Python."""


def _spans(calls: list[dict[str, Any]]) -> Iterator[Span]:
    for call in calls:
        begin_s, length_s = call["begin_s"], call["end_s"] - call["begin_s"]
        yield Span(lane=0, begin_s=begin_s, length_s=length_s)
        yield Span(lane=1, begin_s=begin_s, length_s=min(call["wait_s"], length_s))


def _stage(stage: dict[str, Any]) -> list[str]:
    return [stage["name"], seconds(stage["cpu_s_per_sample"]), percent(stage["share"])]
