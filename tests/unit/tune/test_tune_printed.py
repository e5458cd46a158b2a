"""The text that `stoker profile` and `stoker tune` print without --json."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.measure.traces import resnet_step
from tests.unit.tune.test_tune_profile import profiled
from tests.unit.tune.test_tune_search import World, tuned

from stoker.app.tuning.tuning import Check, Tuning
from stoker.cli.commands.profile import _print as print_profile
from stoker.cli.commands.tune import _print as print_tuning
from stoker.cli.commands.tune import _print_check, _time
from stoker.measure.device_events import read_events
from stoker.measure.device_time import device_time
from stoker.measure.findings import StepFacts, device_finding
from stoker.tune.compare import Gain
from stoker.tune.profile import diagnose
from stoker.tune.report import ProfileReport, mfu, profile_page

GPU = {"index": 1, "utilization": 0.42, "used_bytes": 3 << 30, "power_w": 250.0, "clock_mhz": 1980}

MACHINE: dict[str, Any] = {
    "step_flops_per_sample": 1e6,
    "peak_flops_per_s": 1e10,
    "peak_of": "products of matrices in float32",
    "peak_memory_bytes": 3 << 29,
    "gpus": [GPU],
}


@pytest.fixture
def found(tmp_path: Path) -> ProfileReport:
    measured = profiled(2.0, 10.0, called_ms=3.0, wait=0.5)
    return ProfileReport(
        profile=measured,
        diagnosis=diagnose(measured, own_dataset=False),
        precision=("float32", Gain(ratio=1.0, low=0.9, high=1.1, pairs=6)),
        machine=MACHINE | mfu(MACHINE, measured),
        stages=[{"name": "Map [it]", "cpu_s_per_sample": 1e-3, "share": 0.75}],
        calls=[{"begin_s": 0.0, "end_s": 0.1, "wait_s": 0.05, "steps": 5, "rows": 160.0}],
        page=tmp_path / "profile.html",
        json=tmp_path / "profile.json",
    )


def test_a_profile_is_printed(found: ProfileReport, capsys: pytest.CaptureFixture[str]) -> None:
    print_profile(found)

    lines = [
        " ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.split("\n")
    ]
    for expected in (
        "U, busy fraction 20.0% (20.0% to 20.0%)",
        "W, input wait 50.0%",
        "samples per second 3,200",
        "a step 10 ms, 32 samples",
        "memory 1.50 GiB, the process's peak",
        # 1e6 operations of each of 3,200 samples a second, of 1e10 operations a second.
        "MFU 32.0%: 3.2 of 10 GFLOP/s that products",
        "GPU 1 42% busy, 3.0 GiB, 250 W, 1980 MHz",
        "waiting for input 5 ms 50.0%",
        "Python between calls 1 ms 10.0%",
        "Map [it] 1 ms 75.0%",
        f"page {found.page}",
    ):
        assert any(line.startswith(expected) for line in lines), expected
    assert any(line.startswith("The input is the bottleneck: ") for line in lines)


def test_its_page_shows_a_waterfall_of_the_step_and_a_timeline(found: ProfileReport) -> None:
    text = profile_page(found, "mine")

    assert text.count("<svg") == 2
    for title in ("parts of a step, a waterfall", "calls of training"):
        assert f'aria-label="{title}"' in text or f"<title>{title}</title>" in text
    assert "waiting for input: 5 ms, 50.0%" in text
    assert "Map [it]" in text


@pytest.fixture
def traced(found: ProfileReport) -> ProfileReport:
    """With the trace of a GPU: transposes around a normalization."""
    device = device_time(read_events(resnet_step().bytes()), layers={"conv1": "", "norm1": ""})
    facts = StepFacts(of_script=False, mfu=0.042)
    return replace(found, device=device, device_finding=device_finding(device, facts))


def test_the_devices_time_is_printed_before_the_diagnosis(
    traced: ProfileReport, capsys: pytest.CaptureFixture[str]
) -> None:
    print_profile(traced)

    text = capsys.readouterr().out
    for label, share in (("layout transposes", "38.0%"), ("idle", "3.0%")):
        assert re.search(rf"{label}\W+{share}", text)
    finding = "38% of the step is layout transposes, most in norm1 (38%); MFU 4.2% (at most 1.6x"
    assert text.index(finding) < text.index("The input is the bottleneck: ")


def test_the_devices_time_is_a_bar_and_tables_on_the_page(traced: ProfileReport) -> None:
    text = profile_page(traced, "mine")

    assert text.count("<svg") == 3
    assert 'aria-label="the device&#x27;s time by class of kernel"' in text
    assert "<title>layout transposes: 38.0%</title>" in text
    assert "<div>norm1</div>" in text
    assert "<div>layout transposes 38.0%</div>" in text
    assert "SwapDimension1And2InTensor3UsingTiles (FusedBatchNormV3)" in text
    assert "<Eigen::half" not in text


def test_the_devices_time_is_in_the_json(traced: ProfileReport) -> None:
    from_json = json.loads(json.dumps(traced.to_json(), allow_nan=False))

    assert sum(from_json["device_time"]["shares"].values()) == pytest.approx(1.0)
    assert from_json["device_finding"]["kind"] == "transposes"
    assert from_json["device_finding"]["text"].startswith("38% of the step")


def test_page_and_console_say_why_there_is_no_trace(
    found: ProfileReport, capsys: pytest.CaptureFixture[str]
) -> None:
    without = replace(found, no_device="another profiler is running")
    print_profile(without)

    assert "not measured: another profiler is running." in capsys.readouterr().out
    assert "Not measured: another profiler is running." in profile_page(without, "mine")
    assert "device" not in profile_page(found, "mine").partition("Where the device")[2]


def test_a_tuning_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tuned(World(), tmp_path)

    print_tuning(
        Tuning(
            tuned=result,
            lock=tmp_path / "lock",
            report=tmp_path / "report",
            ledger=tmp_path / "ledger.jsonl",
        )
    )

    printed = capsys.readouterr().out
    assert printed.startswith("Before: The input is the bottleneck")
    for outcome in result.outcomes:
        assert outcome.decision in printed
    assert "samples/s, U 33% ->" in printed
    assert f"lock   {tmp_path / 'lock'}" in printed
    assert "The tuning ended early" not in printed


def test_a_check_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    promised = {"busy_fraction": 1.04, "samples_per_s": 2000.0}
    now = {"busy_fraction": 0.5, "samples_per_s": 900.0, "input_wait": 0.4, "epoch_s": 1.25}

    _print_check(
        Check(
            promised=promised,
            measured=now,
            broken=("U is 50.0%",),
            loads=(),
            not_quiet="It was loud.",
            slower="It was slow.",
        )
    )

    lines = [
        " ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.split("\n")
    ]
    for expected in (
        "busy_fraction 1 0.5",
        "samples_per_s 2,000 900",
        "input_wait 0.4",
        "broken: U is 50.0%",
        "It was slow.",
        "It was loud.",
    ):
        assert expected in lines, expected
    assert "The figures of the lock file are still reached." not in lines


@pytest.mark.parametrize(
    ("left_s", "text"), [(0.0, "  0:00"), (61.9, "  1:01"), (7200.0, "120:00")]
)
def test_the_time_left_is_minutes_and_seconds(left_s: float, text: str) -> None:
    assert _time(left_s) == text
