"""The class that costs most is the first finding, with its layer, what to do, and an upper bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.measure.traces import resnet_step

from stoker.measure.device_events import read_events
from stoker.measure.device_findings import DeviceFinding, StepFacts, device_finding
from stoker.measure.device_time import DeviceTime, device_time
from stoker.measure.kernel_class import CLASSES

SCRIPT, EXPERIMENT = StepFacts(of_script=True), StepFacts(of_script=False)


def time_of(**shares: float) -> DeviceTime:
    """The rest is products."""
    given = dict.fromkeys((*CLASSES, "idle"), 0.0) | shares
    given["products"] = 1.0 - sum(shares.values())
    return DeviceTime(
        devices=("GPU:0",),
        window_s=0.1,
        shares=given,
        casts=0.0,
        kernels=(),
        layers=(),
        layer_types={},
    )


def found(time: DeviceTime, facts: StepFacts = EXPERIMENT) -> DeviceFinding:
    finding = device_finding(time, facts)
    assert finding is not None
    return finding


def test_transposes_around_a_normalization() -> None:
    time = device_time(
        read_events(resnet_step().bytes()),
        layers={"conv1": "Conv2D", "norm1": "BatchNormalization"},
    )

    finding = found(time, replace(EXPERIMENT, mfu=0.042))

    assert (finding.kind, finding.layer) == ("transposes", "norm1")
    assert finding.seen == (
        "38% of the step is layout transposes, 38% around layers of type BatchNormalization, "
        "most in norm1 (38%); MFU 4.2%"
    )
    assert "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT=1" in finding.change
    assert finding.most_gain == pytest.approx(1 / 0.62)
    assert "at most 1.6x" in finding.text
    scripted = found(time, SCRIPT)
    assert 'os.environ["TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"] = "1"' in scripted.change


def test_nothing_is_found_where_products_take_the_time_near_the_peak() -> None:
    assert device_finding(time_of(elementwise=0.25, idle=0.1), EXPERIMENT) is None
    assert device_finding(time_of(elementwise=0.25), replace(EXPERIMENT, mfu=0.2)) is None


def test_from_a_quarter_of_the_time_on_a_class_is_a_finding_whatever_the_mfu() -> None:
    assert found(time_of(elementwise=0.26), replace(EXPERIMENT, mfu=0.6)).kind == "elementwise"


def test_at_a_low_mfu_the_largest_class_is_a_finding() -> None:
    low = replace(EXPERIMENT, mfu=0.1)

    assert found(time_of(idle=0.2, elementwise=0.1), low).kind == "products"
    # The time of the products at the peak cannot disappear: 0.7 of the time, of which 0.1 remains.
    assert found(time_of(idle=0.2, elementwise=0.1), low).most_gain == pytest.approx(1 / 0.4)
    assert found(time_of(idle=0.24, copies=0.2, other=0.2, elementwise=0.2), low).kind == "idle"


@pytest.mark.parametrize(
    ("shares", "facts", "expected"),
    [
        ({"normalization": 0.5}, EXPERIMENT, "train.xla: true"),
        ({"normalization": 0.5}, SCRIPT, "jit_compile=True"),
        ({"normalization": 0.5}, replace(SCRIPT, xla=True), "XLA has fused it already"),
        ({"elementwise": 0.5}, EXPERIMENT, "train.xla: true"),
        ({"elementwise": 0.5}, replace(EXPERIMENT, xla=True), "train.precision: mixed_bfloat16"),
        (
            {"elementwise": 0.5},
            replace(EXPERIMENT, xla=True, precision="mixed_float16"),
            "Leave out casts",
        ),
        ({"transposes": 0.5}, replace(EXPERIMENT, xla=True), "channels_last, NHWC."),
        ({"copies": 0.5}, SCRIPT, "uint8"),
        ({"copies": 0.5}, EXPERIMENT, "uint8"),
        ({"collectives": 0.5}, EXPERIMENT, "train.accumulate"),
        ({"collectives": 0.5}, SCRIPT, "accumulate gradients"),
        ({"idle": 0.5}, EXPERIMENT, "train.steps_per_call"),
        ({"idle": 0.5}, SCRIPT, "steps_per_execution"),
        ({"idle": 0.5}, replace(EXPERIMENT, steps_per_call=100, xla=True), "Try a larger batch."),
        ({"idle": 0.5}, replace(EXPERIMENT, input_wait=0.4), "stoker tune"),
        ({"other": 0.5}, SCRIPT, "jit_compile=True"),
        ({"idle": 0.1}, replace(EXPERIMENT, mfu=0.1), "mixed_bfloat16"),
        (
            {"idle": 0.1},
            replace(SCRIPT, mfu=0.1, precision="mixed_float16"),
            "multiples of 8",
        ),
    ],
)
def test_each_class_says_what_helps(
    shares: dict[str, float], facts: StepFacts, expected: str
) -> None:
    finding = found(time_of(**shares), facts)

    assert expected in finding.change
    assert finding.why.endswith(".")
    assert finding.text.startswith(finding.seen)


def test_a_share_that_is_nearly_all_promises_no_more_than_is_known() -> None:
    assert found(time_of(idle=0.999)).most_gain == 20.0


def test_casts_are_named_where_they_cost() -> None:
    assert "12% of the step" in found(replace(time_of(elementwise=0.5), casts=0.12)).why


def test_a_stand_in_says_that_it_is_one() -> None:
    finding = found(replace(time_of(idle=0.5), of_cpu=True))

    assert "operations of the CPU, not kernels of a GPU" in finding.seen
