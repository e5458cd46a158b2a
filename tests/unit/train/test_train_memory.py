"""Settings of GPU memory that TensorFlow gets; the GPUs are simulated."""

from __future__ import annotations

from typing import Any

import pytest
import tensorflow as tf

from stoker.core.errors import ConfigError
from stoker.train.config import MemoryConfig
from stoker.train.setup.device_settings import apply_memory

GPUS = [f"/physical_device:GPU:{index}" for index in range(3)]

Calls = list[tuple[Any, ...]]


@pytest.fixture
def tensorflow_calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """What TensorFlow's functions were called with, on a machine of three GPUs."""
    calls: Calls = []

    def limits(gpu: str, parts: list[Any]) -> None:
        calls.append(("limit", gpu, [part.memory_limit for part in parts]))

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: {"GPU": GPUS}[kind])
    monkeypatch.setattr(
        tf.config, "set_visible_devices", lambda *arguments: calls.append(("visible", *arguments))
    )
    monkeypatch.setattr(tf.config, "set_logical_device_configuration", limits)
    monkeypatch.setattr(tf.config, "get_logical_device_configuration", lambda gpu: None)
    monkeypatch.setattr(
        tf.config.experimental,
        "set_memory_growth",
        lambda *arguments: calls.append(("growth", *arguments)),
    )
    return calls


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MemoryConfig(), [("growth", gpu, True) for gpu in GPUS]),
        (MemoryConfig(growth=False), [("growth", gpu, False) for gpu in GPUS]),
        (MemoryConfig(limit_mb=2048), [("limit", gpu, [2048]) for gpu in GPUS]),
        (MemoryConfig(limit_mb=1, growth=True), [("limit", gpu, [1]) for gpu in GPUS]),
        (
            MemoryConfig(visible_devices=(2, 0)),
            [
                ("visible", [GPUS[0], GPUS[2]], "GPU"),
                ("growth", GPUS[0], True),
                ("growth", GPUS[2], True),
            ],
        ),
        (
            MemoryConfig(visible_devices=(1,), limit_mb=512),
            [("visible", [GPUS[1]], "GPU"), ("limit", GPUS[1], [512])],
        ),
        (MemoryConfig(visible_devices=()), [("visible", [], "GPU")]),
    ],
    ids=str,
)
def test_growth_limit_and_visible_gpus_reach_tensorflow(
    tensorflow_calls: Calls, config: MemoryConfig, expected: Calls
) -> None:
    apply_memory(config)

    assert tensorflow_calls == expected


def test_a_gpu_that_the_user_has_cut_in_two_is_not_made_to_grow(
    tensorflow_calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    halves = [tf.config.LogicalDeviceConfiguration(memory_limit=64) for _ in range(2)]
    monkeypatch.setattr(
        tf.config,
        "get_logical_device_configuration",
        lambda gpu: halves if gpu == GPUS[1] else None,
    )

    apply_memory(MemoryConfig())

    assert tensorflow_calls == [("growth", gpu, True) for gpu in (GPUS[0], GPUS[2])]


def test_a_gpu_that_is_not_there_is_refused_before_anything_is_set(tensorflow_calls: Calls) -> None:
    with pytest.raises(ConfigError, match="must name GPUs of this machine") as error:
        apply_memory(MemoryConfig(visible_devices=(0, 3)))

    assert "It has 3, numbered from 0." in error.value.line()
    assert tensorflow_calls == []


@pytest.mark.usefixtures("tensorflow_calls")
def test_a_setting_that_comes_too_late_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def begun(*_: Any) -> None:
        raise RuntimeError("Physical devices cannot be modified after being initialized")

    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", begun)

    apply_memory(MemoryConfig())
    with pytest.raises(ConfigError, match="must be set before TensorFlow is used"):
        apply_memory(MemoryConfig(growth=False))
