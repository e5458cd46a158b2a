"""Precision, loss scaling and XLA: what each computes in, and that all of them learn the same."""

from __future__ import annotations

import pytest
from tests.gpu.conftest import Device
from tests.gpu.pictures import Pictures, Trained

pytestmark = pytest.mark.gpu

TOLERANCE = {"mixed_bfloat16": 0.15, "mixed_float16": 0.05}
"""Most that the last loss may differ from float32's; it begins at log(2) = 0.69."""


@pytest.fixture(scope="module")
def in_float32(pictures: Pictures) -> Trained:
    return pictures.train("train.precision=float32", "train.tf32=false", "train.xla=false")


def test_without_mixed_precision_all_is_float32(in_float32: Trained) -> None:
    assert (in_float32.facts["compute"], in_float32.facts["variables"]) == ("float32", "float32")
    assert in_float32.facts["scale"] is None
    assert in_float32.result["metrics"]["loss"] < 0.4


@pytest.mark.parametrize(
    "precision", [pytest.param("mixed_bfloat16", marks=pytest.mark.slow), "mixed_float16"]
)
def test_mixed_precision_learns_what_float32_learns(
    precision: str, in_float32: Trained, pictures: Pictures
) -> None:
    trained = pictures.train(f"train.precision={precision}", "train.xla=false")

    assert trained.result["resolved"]["precision"] == precision
    assert trained.facts["compute"] == precision.removeprefix("mixed_")
    assert trained.facts["variables"] == "float32"
    # Gradients in float16 would become zero without a loss scale; bfloat16 has float32's range.
    assert (trained.facts["scale"] is not None) == (precision == "mixed_float16")
    losses = [each.result["metrics"]["loss"] for each in (trained, in_float32)]
    assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE[precision])


@pytest.mark.slow
def test_xla_changes_no_more_than_rounding(
    device: Device, in_float32: Trained, pictures: Pictures
) -> None:
    compiled = pictures.train("train.precision=float32", "train.tf32=false", "train.xla=true")

    assert (compiled.result["resolved"]["xla"], in_float32.result["resolved"]["xla"]) == (
        True,
        False,
    )
    assert ("GPU" in compiled.facts["device"]) == (device == "gpu")
    losses = [each.result["metrics"]["loss"] for each in (compiled, in_float32)]
    assert losses[0] == pytest.approx(losses[1], rel=0.02)
