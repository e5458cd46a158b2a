"""The reports of `stoker tune` (lever by lever) and of `stoker profile` (one training), as HTML pages."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stoker.core.errors import Finding
from stoker.measure.device_page import device_section, finding_section
from stoker.measure.device_time import DeviceTime
from stoker.measure.findings import DeviceFinding
from stoker.pages.bars import Bar, Span, timeline, waterfall, waterfall_of_parts
from stoker.pages.html import Html, badge, page, paragraph, section
from stoker.pages.numbers import percent, seconds
from stoker.pages.table import Number, Prose, facts, table
from stoker.tune.compare import Gain
from stoker.tune.profile import PARTS, Diagnosis, Profile, Split
from stoker.tune.search import Outcome, Tuned


def report(tuned: Tuned, *, name: str, usd_per_hour: float | None) -> str:
    """Return the page of a tuning, HTML.

    Args:
        tuned: The result.
        name: Name of the experiment.
        usd_per_hour: Price of the machine; None if unknown.
    """
    gain = tuned.after.samples_per_s / tuned.before.samples_per_s
    return page(
        f"Tuning of {name}",
        [
            paragraph(
                f"{gain:.2f} times the samples per second, measured in {seconds(tuned.took_s)}. "
                f"Tuning ended: {tuned.ended}."
            ),
            section("From first to last", steps_of(tuned), _figures(tuned, usd_per_hour)),
            section(
                "What was found",
                paragraph(f"Before: {tuned.diagnosis_before.text}"),
                paragraph(f"After: {tuned.diagnosis_after.text}"),
            ),
            section(
                "What was tried",
                table(
                    ["lever", "decision", Prose("why"), Number("took")],
                    map(_outcome, tuned.outcomes),
                )
                or paragraph("Nothing."),
                paragraph(
                    f"Two processes with the same settings differed by {tuned.noise.shown()}. A gain "
                    "counts only if the whole interval of its median is above this difference and above "
                    "5 %. All samples are in ledger.jsonl next to this page.",
                    quiet=True,
                ),
            ),
            section(
                "A step before tuning",
                parts_of_a_step(tuned.before.split, title="a step before tuning"),
            ),
            section(
                "A step after tuning",
                parts_of_a_step(tuned.after.split, title="a step after tuning"),
            ),
        ],
    )


def parts_of_a_step(split: Split, *, title: str) -> Html:
    """Return a waterfall of the parts of a step: each bar begins where the previous one ends."""
    bars = [
        Bar(
            label=PARTS[part],
            value=share,
            shown=f"{seconds(share * split.step_s)}, {percent(share)}",
        )
        for part, share in split.shares().items()
    ]
    return waterfall_of_parts(bars, title=title)


def steps_of(tuned: Tuned) -> Html:
    """Return a waterfall of the samples per second, from the unchanged experiment to the tuned one."""
    before = tuned.before.samples_per_s
    rises = [Bar(label="before", value=before, shown=_speed(tuned.before))]
    reached = before
    for outcome in tuned.outcomes:
        if outcome.decision != "kept":
            continue
        reached *= outcome.gain.ratio
        rises.append(Bar(label=outcome.lever, value=reached, shown=outcome.gain.shown()))
    rises.append(Bar(label="tuned", value=tuned.after.samples_per_s, shown=_speed(tuned.after)))
    return waterfall(rises, title="samples per second, lever by lever")


def _speed(profile: Profile) -> str:
    return f"{profile.samples_per_s:,.0f} samples/s, U {min(1.0, profile.busy_fraction):.0%}"


def _outcome(outcome: Outcome) -> list[str]:
    decision = badge(outcome.decision, kind="good" if outcome.decision == "kept" else "quiet")
    return [outcome.lever, decision, outcome.why, seconds(outcome.took_s)]


def _figures(tuned: Tuned, usd_per_hour: float | None) -> Html:
    before, after = tuned.before, tuned.after
    rows = [
        ["U, busy fraction", f"{before.busy_fraction:.1%}", f"{after.busy_fraction:.1%}"],
        ["W, input wait", f"{before.input_wait:.1%}", f"{after.input_wait:.1%}"],
        ["samples per second", f"{before.samples_per_s:,.0f}", f"{after.samples_per_s:,.0f}"],
        ["an epoch's steps", seconds(before.epoch_s), seconds(after.epoch_s)],
    ]
    if usd_per_hour is not None:
        costs = [f"{each.epoch_s * usd_per_hour / 3600:.4g} USD" for each in (before, after)]
        rows.append(["an epoch's cost", *costs])
    return table(["", Number("before"), Number("after")], rows)


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfileReport:
    """What `stoker profile` measured, and the paths of its files."""

    profile: Profile
    diagnosis: Diagnosis
    precision: tuple[str, Gain] | None
    """Another precision, and the speedup that it gives to a step on a resident batch; None if no time was left."""

    machine: dict[str, Any]
    """The model's FLOPs, the device's peak rate, the process's peak memory, and the use of GPUs."""

    stages: list[dict[str, Any]]
    """For each stage of the input: name, CPU seconds per sample, share of the input's CPU time."""

    calls: list[dict[str, Any]]
    """For each call of the timeline: start, end, and wait for input, seconds."""

    findings: list[Finding] = field(default_factory=list)
    """Costs of the model that can be avoided."""

    device: DeviceTime | None = None
    """Device time by kernel class; None without a GPU."""

    device_finding: DeviceFinding | None = None
    """The most expensive kernel class; None if its share is small."""

    no_device: str = ""
    """Why `device` is None although there is a GPU; empty otherwise."""

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


def mfu(machine: dict[str, Any], measured: Profile) -> dict[str, Any]:
    """Return the achieved FLOP/s of training, and their share of the peak rate (MFU); None if unknown."""
    flops, peak = machine.get("step_flops_per_sample"), machine.get("peak_flops_per_s")
    if not flops or not peak:
        return {"achieved_flops_per_s": None, "mfu": None}
    achieved = flops * measured.samples_per_s
    return {"achieved_flops_per_s": achieved, "mfu": achieved / peak}


def rows_of(found: ProfileReport) -> list[tuple[str, str]]:
    """Return name and value of each figure, as text for the user."""
    measured, machine = found.profile, found.machine
    rows = [
        (
            "U, busy fraction",
            f"{measured.busy_fraction:.1%}  ({measured.busy_low:.1%} to {measured.busy_high:.1%})",
        ),
        ("W, input wait", f"{measured.input_wait:.1%}"),
        ("samples per second", f"{measured.samples_per_s:,.0f}"),
        ("a step", f"{seconds(measured.split.step_s)}, {measured.rows_a_step:.0f} samples"),
        ("an epoch's steps", seconds(measured.epoch_s)),
        ("input", f"{seconds(measured.input_cpu_s_per_sample)} of CPU time per sample"),
        ("memory", f"{machine['peak_memory_bytes'] / 2**30:.2f} GiB, the process's peak"),
    ]
    if machine.get("mfu") is not None:
        achieved, peak = machine["achieved_flops_per_s"] / 1e9, machine["peak_flops_per_s"] / 1e9
        reached = f"{machine['mfu']:.1%}: {achieved:.3g} of {peak:.3g} GFLOP/s that"
        rows.append(("MFU", f"{reached} {machine['peak_of']} reach"))
    if found.precision is None:
        rows.append(("another precision", "not measured: the budget was used up"))
    return rows + [(f"GPU {gpu['index']}", _gpu(gpu)) for gpu in machine["gpus"]]


def _gpu(gpu: dict[str, Any]) -> str:
    busy, used = f"{gpu['utilization']:.0%} busy", f"{gpu['used_bytes'] / 2**30:.1f} GiB"
    return f"{busy}, {used}, {gpu['power_w']:.0f} W, {gpu['clock_mhz']:.0f} MHz"


def profile_page(found: ProfileReport, name: str) -> str:
    """Return the page of a profile, HTML."""
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
                table(
                    ["stage", Number("CPU time per sample"), Number("share")],
                    map(_stage, found.stages),
                )
                or paragraph("Nothing: all samples are in memory, ready for training."),
            ),
        ],
    )


LANES = ("a call", "waits for input")
"""Lanes of the timeline; in gaps of the first lane, Python runs."""


def _spans(calls: list[dict[str, Any]]) -> Iterator[Span]:
    for call in calls:
        begin_s, length_s = call["begin_s"], call["end_s"] - call["begin_s"]
        yield Span(lane=0, begin_s=begin_s, length_s=length_s)
        yield Span(lane=1, begin_s=begin_s, length_s=min(call["wait_s"], length_s))


def _stage(stage: dict[str, Any]) -> list[str]:
    return [stage["name"], seconds(stage["cpu_s_per_sample"]), percent(stage["share"])]
