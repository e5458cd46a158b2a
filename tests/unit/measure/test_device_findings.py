"""The class that costs most is the first finding, with its layer, what to do, and an upper bound."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.unit.measure.traces import resnet_step

from stoker.measure.device_events import read_events
from stoker.measure.device_time import DeviceTime, KernelTime, device_time
from stoker.measure.findings import DeviceFinding, StepFacts, device_finding
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
    assert finding.observation == (
        "38% of the step is layout transposes, 38% around layers of type BatchNormalization, "
        "most in norm1 (38%); MFU 4.2%"
    )
    assert "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT=1" in finding.change
    assert finding.most_gain == pytest.approx(1 / 0.62)
    assert "at most 1.6x" in finding.text
    scripted = found(time, SCRIPT)
    assert 'os.environ["TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT"] = "1"' in scripted.change
    assert 'set_global_policy("mixed_bfloat16")' in scripted.change


@pytest.mark.parametrize(
    ("precision", "nhwc_allowed", "expected"),
    [
        ("float32", True, "Set train.precision: mixed_bfloat16 or mixed_float16: only then"),
        ("mixed_float16", False, "Set TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT=1: only then"),
        ("mixed_float16", True, "cuDNN refuses NHWC for these BatchNormalizations, or train.xla"),
    ],
)
def test_only_what_is_not_set_yet_is_advised(
    precision: str, nhwc_allowed: bool, expected: str
) -> None:
    time = device_time(read_events(resnet_step().bytes()))

    finding = found(time, replace(EXPERIMENT, precision=precision, nhwc_allowed=nhwc_allowed))

    assert finding.change.startswith(expected)


@pytest.mark.parametrize("name", ["norm1", "bn", "layer_norm", "conv1"])
@pytest.mark.parametrize("facts", [SCRIPT, EXPERIMENT])
def test_transposes_that_are_not_of_a_fused_batch_normalization_have_other_advice(
    name: str, facts: StepFacts
) -> None:
    """`norm1` may be a LayerNormalization; Keras's own BatchNormalization transposes nothing."""
    types = {str(kind): {name: 0.5} for kind in CLASSES}
    time = replace(time_of(transposes=0.5), layer_types=types)

    assert found(time, facts).change.startswith("Keep images in channels_last, NHWC")


@pytest.mark.parametrize(
    ("kind", "kernel", "facts", "expected"),
    [
        ("BatchNormalization", "EigenMetaKernel", SCRIPT, "tf.nn.fused_batch_norm"),
        # Stoker's own step does so already where it can.
        ("BatchNormalization", "EigenMetaKernel", EXPERIMENT, "Fuse it: train.xla: true."),
        ("LayerNormalization", "EigenMetaKernel", SCRIPT, "compile(..., jit_compile=True)."),
        ("GroupNormalization", "EigenMetaKernel", SCRIPT, "compile(..., jit_compile=True)."),
        (
            "BatchNormalization",
            "cudnn::bn_fw_tr_1C11_kernel_NCHW (FusedBatchNormV3)",
            EXPERIMENT,
            "with its neighbors: train.xla: true.",
        ),
    ],
)
def test_a_normalization_is_fused_by_what_can_fuse_it(
    kind: str, kernel: str, facts: StepFacts, expected: str
) -> None:
    took = KernelTime(name=kernel, kind="normalization", layer="", share=0.5, times=1)
    types = {"normalization": {kind: 0.5}}
    time = replace(time_of(normalization=0.5), kernels=(took,), layer_types=types)

    change = found(time, facts).change

    assert change.endswith(expected) or expected in change
    assert ("fused_batch_norm" in change) == ("fused_batch_norm" in expected)


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
    assert finding.text.startswith(finding.observation)


def test_a_share_that_is_nearly_all_promises_no_more_than_is_known() -> None:
    assert found(time_of(idle=0.999)).most_gain == 20.0


def test_casts_are_named_where_they_cost() -> None:
    assert "12% of the step" in found(replace(time_of(elementwise=0.5), casts=0.12)).why


def test_a_stand_in_says_that_it_is_one() -> None:
    finding = found(replace(time_of(idle=0.5), of_cpu=True))

    assert "operations of the CPU, not kernels of a GPU" in finding.observation
