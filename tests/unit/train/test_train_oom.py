"""What counts as out of memory, and what follows; real allocations that fail are in integration."""

from __future__ import annotations

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from stoker.core.errors import ConfigError
from stoker.train.config import MemoryConfig
from stoker.train.setup.device_settings import apply_memory
from stoker.train.step.oom import (
    Split,
    does_not_fit,
    is_out_of_memory,
    reduce_batch,
    what_did_not_fit,
)

TENSOR = tf.errors.ResourceExhaustedError(
    None,
    None,
    "OOM when allocating tensor with shape[1024,1024,256] and type half on "
    "/job:localhost/replica:0/task:0/device:GPU:0 by allocator GPU_0_bfc",
)
XLA = tf.errors.ResourceExhaustedError(
    None, None, "Out of memory while trying to allocate 29.10GiB."
)


@pytest.mark.parametrize(
    ("error", "figure"),
    [
        (TENSOR, "512 MiB for a half tensor of 1024 x 1024 x 256 on GPU:0"),
        (XLA, "29.10GiB"),
        (tf.errors.InternalError(None, None, "CUBLAS_STATUS_ALLOC_FAILED"), "CUBLAS"),
        (MemoryError("no room"), "no room"),
    ],
)
def test_memory_that_is_used_up_is_recognized_and_its_figure_reported(
    error: Exception, figure: str
) -> None:
    assert is_out_of_memory(error)
    assert figure in what_did_not_fit(error)


@pytest.mark.parametrize(
    "error",
    [
        tf.errors.ResourceExhaustedError(None, None, "/data/shard-7; Too many open files"),
        tf.errors.ResourceExhaustedError(None, None, "Received message larger than max (5 vs 4)"),
        tf.errors.InvalidArgumentError(None, None, "Incompatible shapes"),
        ValueError("out of memory of what happened"),
    ],
)
def test_other_resources_and_other_errors_are_not_memory(error: Exception) -> None:
    assert not is_out_of_memory(error)


@given(st.integers(1, 5000), st.integers(1, 64))
def test_a_reduction_keeps_the_samples_of_an_update(half: int, accumulate: int) -> None:
    before = Split(batch_size=2 * half, accumulate=accumulate)
    after = reduce_batch(before, TENSOR).after

    assert after.batch_size == half
    assert after.batch_size * after.accumulate == before.batch_size * before.accumulate


def test_a_reduction_says_what_did_not_fit_and_what_changes() -> None:
    message = reduce_batch(Split(batch_size=64, accumulate=1), XLA).message

    assert "29.10GiB" in message
    assert "train.batch_size 64 -> 32, train.accumulate 1 -> 2" in message


@pytest.mark.parametrize(
    ("batch_size", "advice"), [(1, "Not even one sample fits"), (15, r"train.batch_size to 7")]
)
def test_a_batch_without_a_half_is_refused_with_the_figure(batch_size: int, advice: str) -> None:
    with pytest.raises(ConfigError, match=f"29.10GiB.*{advice}"):
        reduce_batch(Split(batch_size=batch_size, accumulate=1), XLA)


def test_under_stop_the_figure_is_reported() -> None:
    line = does_not_fit(Split(batch_size=64, accumulate=1), TENSOR).line()

    assert "512 MiB" in line
    assert "train.batch_size to 32" in line


@pytest.mark.parametrize("wrong", [{"limit_mb": 0}, {"visible_devices": (0, 0)}])
def test_memory_settings_that_cannot_be_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"train\.memory\."):
        MemoryConfig(**wrong)  # type: ignore[arg-type]  # mypy cannot check **


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="must name GPUs of this machine"):
        apply_memory(MemoryConfig(visible_devices=(63,)))
