"""Traces that TensorFlow's profiler really wrote, and what becomes of those that cannot be read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import keras
import pytest
import tensorflow as tf
from tests.unit.measure.traces import CONVOLUTION, Ran, Trace, resnet_step

from stoker.measure.device_events import TraceError, read_events
from stoker.measure.device_trace import STAND_IN, DeviceTrace, can_trace, time_in, traced

LAYERS = {"conv_a": "Conv2D", "norm_a": "BatchNormalization", "act": "ReLU", "head": "Dense"}


@pytest.fixture
def of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations of the CPU are taken for kernels."""
    monkeypatch.setenv(STAND_IN, "1")


def make_step(*, xla: bool) -> Callable[[tf.Tensor], list[tf.Tensor]]:
    model = keras.Sequential(
        [
            keras.Input((32, 32, 3)),
            keras.layers.Conv2D(16, 3, name="conv_a"),
            keras.layers.BatchNormalization(name="norm_a"),
            keras.layers.ReLU(name="act"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(10, name="head"),
        ]
    )

    @tf.function(jit_compile=xla)
    def step(images: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(images, training=True) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    return step


@pytest.mark.parametrize("xla", [False, True])
@pytest.mark.usefixtures("of_cpu")
def test_a_real_trace_of_a_step_has_its_classes_and_layers(xla: bool, tmp_path: Path) -> None:
    step, images = make_step(xla=xla), tf.ones([32, 32, 32, 3])
    step(images)

    with traced(tmp_path) as trace:
        for _ in range(5):
            step(images)[0].numpy()

    found = time_in(trace[0], layers=LAYERS)
    assert found.of_cpu
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert found.shares["products"] > 0.05
    assert found.shares["normalization"] > 0.05
    assert found.shares["collectives"] == 0.0
    by_layer = {each.layer: each for each in found.layers}
    assert by_layer["conv_a"].kinds["products"] > 0
    assert by_layer["norm_a"].kinds["normalization"] > 0
    assert by_layer["head"].kinds["products"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_profiler_that_runs_already_is_left_alone(tmp_path: Path) -> None:
    tf.profiler.experimental.start(str(tmp_path / "theirs"))
    try:
        with pytest.raises(TraceError, match="another profiler is running"):
            DeviceTrace(tmp_path)
    finally:
        tf.profiler.experimental.stop()
    assert [each.name for each in tmp_path.iterdir()] == ["theirs"]


def test_a_profiler_that_somebody_else_ended_is_one_line(tmp_path: Path) -> None:
    trace = DeviceTrace(tmp_path)
    tf.profiler.experimental.stop(save=False)

    with pytest.raises(TraceError, match="did not end"):
        trace.stop()
    assert list(tmp_path.iterdir()) == []


def test_what_fails_inside_is_not_hidden_and_ends_the_profiler(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), traced(tmp_path):
        raise ZeroDivisionError
    DeviceTrace(tmp_path).stop()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be written"):
        DeviceTrace(tmp_path / "missing")


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.999])
def test_a_trace_that_is_cut_is_damaged(share: float) -> None:
    whole = resnet_step().bytes()

    with pytest.raises(TraceError, match=r"damaged|holds no kernel"):
        read_events(whole[: int(share * len(whole))])


def test_an_empty_trace_and_one_of_nothing_say_so() -> None:
    with pytest.raises(TraceError, match="the trace is empty"):
        read_events(b"")
    with pytest.raises(TraceError, match="holds no kernel of a GPU"):
        read_events(Trace().bytes())
    with pytest.raises(TraceError, match="holds no kernel of a GPU"):
        read_events(Trace().gpu(0).bytes())
    with pytest.raises(TraceError, match="holds no operation of the CPU"):
        read_events(resnet_step().bytes(), of_cpu=True)


def test_an_event_without_length_or_name_harms_nothing() -> None:
    trace = Trace().gpu(
        0,
        Ran(name=CONVOLUTION, begin_us=0, length_us=0),
        Ran(name="", begin_us=1, length_us=1),
        Ran(name=CONVOLUTION, begin_us=2, length_us=1),
    )
    trace.space.planes[1].lines[0].events.add(metadata_id=10**6, offset_ps=1, duration_ps=10**6)

    (device,) = read_events(trace.bytes())

    assert len(device.events) == 3


def test_without_a_gpu_nothing_is_traced_unless_tests_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STAND_IN, raising=False)
    if not tf.config.list_physical_devices("GPU"):
        assert not can_trace()
    monkeypatch.setenv(STAND_IN, "1")
    assert can_trace()


def test_of_a_trace_with_too_many_events_the_first_part_of_all_streams_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("stoker.measure.device_events.MAX_EVENTS", 100)
    many = [Ran(name=CONVOLUTION, begin_us=at, length_us=1) for at in range(300)]
    few = [Ran(name="MemcpyH2D", begin_us=at, length_us=1, stream=14) for at in range(0, 300, 3)]

    (device,) = read_events(Trace().gpu(0, *many, *few).bytes())

    copies = [event for event in device.events if event.kernel.name == "MemcpyH2D"]
    assert len(copies) == 25
    assert len(device.events) == 100
    assert max(event.begin_ps for event in device.events) <= 76 * 10**6
