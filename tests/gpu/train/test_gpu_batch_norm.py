"""cuDNN's kernel for NHWC computes BatchNormalization in 16 bits: its name is in a trace of the device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.gpu.conftest import Device
from tests.gpu.pictures import TIMEOUT_S

from stoker.measure.kernel_class import batch_norm_kernels

pytestmark = pytest.mark.gpu

CHILD = Path(__file__).with_name("batch_norm_child.py")


def traced(tmp_path: Path, policy: str, **environment: str) -> dict[str, Any]:
    """The output of a process that trains a small network in a precision, and traces it."""
    ran = subprocess.run(
        [sys.executable, str(CHILD), policy, str(tmp_path)],
        # Other tests share the card: TensorFlow alone would take all of its memory.
        env=os.environ | {"TF_FORCE_GPU_ALLOW_GROWTH": "true"} | environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_16_bits_run_by_the_kernel_for_nhwc(tmp_path: Path, device: Device, policy: str) -> None:
    if device == "cpu" and policy == "mixed_float16":
        pytest.skip("a CPU computes convolutions in float16 for minutes")
    result = traced(tmp_path, policy)
    found = batch_norm_kernels(result["kernels"])

    assert all(loss == loss for loss in result["losses"])
    assert result["losses"][-1] < result["losses"][0]
    if device == "cpu":
        assert result["kernels"] == []
        return
    assert found.is_persistent, f"{found.text()}; all kernels: {result['kernels']}"


def test_without_the_flag_it_does_not(tmp_path: Path, device: Device) -> None:
    if device == "cpu":
        pytest.skip("a CPU has no such kernel")
    flag = {"TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT": "0"}
    found = batch_norm_kernels(traced(tmp_path, "mixed_bfloat16", **flag)["kernels"])

    assert found.way == "nchw", found.text()
