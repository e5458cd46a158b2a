"""A script's device: the trace that the watcher takes, and the report about it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from tests.unit.measure.traces import resnet_step
from tests.unit.scriptprofile.watched import at, fit, loop, watched

from stoker.measure.device_events import read_events
from stoker.measure.device_time import DeviceTime, device_time
from stoker.scriptprofile.counting import _device
from stoker.scriptprofile.observations import Reached
from stoker.scriptprofile.page import page_html
from stoker.scriptprofile.profile import ScriptProfile
from stoker.scriptprofile.rules.diagnose import diagnose
from stoker.scriptprofile.rules.input_rules import Machine
from stoker.scriptprofile.watcher.stoker_watch import device_trace
from stoker.scriptprofile.watcher.stoker_watch.device_trace import STAND_IN, Tracer
from stoker.scriptprofile.watcher.stoker_watch.watch import FACTS

MACHINE = Machine(cores=4, memory_bytes=2**33)


@dataclass
class Line:
    """A line that trains: a thread that multiplies."""

    steps: int = 0
    passes: int = 0
    measured: bool = True
    trace: dict[str, Any] = field(default_factory=dict)
    ends: threading.Event = field(default_factory=threading.Event)

    def is_measured(self) -> bool:
        return self.measured

    def step_s(self) -> float:
        return 0.002

    def whole_passes(self) -> int:
        return self.passes

    def train(self) -> None:
        step = tf.function(lambda x: tf.matmul(x, x))
        while not self.ends.is_set():
            step(tf.ones([300, 300])).numpy()
            self.steps += 1


@pytest.fixture
def line() -> Iterator[Line]:
    trains = Line()
    thread = threading.Thread(target=trains.train)
    thread.start()
    _until(lambda: trains.steps > 10)
    yield trains
    trains.ends.set()
    thread.join()


@pytest.fixture
def tracer(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tracer:
    """Of a process with one line that trains."""
    for name, value in (("folder", str(tmp_path)), ("looks", []), ("ends", []), ("forgets", [])):
        monkeypatch.setattr(FACTS, name, value)
    monkeypatch.setenv(STAND_IN, "1")

    # Wrapped by the tracer, and as before after the test.
    monkeypatch.setattr(tf.profiler.experimental, "start", tf.profiler.experimental.start)
    found = Tracer()
    found.install(tf, lines=lambda: [line])
    found.knows_keras(list, lambda: [("conv1", "Conv2D", ("/home/me/train.py", 7))])
    return found


def test_a_line_is_traced_once_and_read(tracer: Tracer, line: Line, tmp_path: Path) -> None:
    tracer.look()

    assert line.trace["layers"] == [["conv1", "Conv2D", "/home/me/train.py", 7]]
    result = _device(line.trace, tmp_path)
    assert result["why"] == ""
    assert result["time"]["shares"]["products"] > 0.1
    line.trace = {}
    tracer.look()
    assert line.trace == {}


def test_before_u_is_measured_nothing_is_traced(tracer: Tracer, line: Line) -> None:
    line.measured = False
    tracer.look()

    assert line.trace == {}


def test_without_a_device_nothing_is_traced(
    tracer: Tracer, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(STAND_IN)
    if not tf.config.list_physical_devices("GPU"):
        tracer.look()
        assert line.trace == {}


def test_a_trace_with_too_few_steps_is_taken_again(
    tracer: Tracer, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_trace, "MIN_STEPS", 10**9)
    monkeypatch.setattr(device_trace, "MIN_S", 0.01)
    for _ in range(device_trace.MAX_TRIES - 1):
        tracer.look()
        assert line.trace == {}

    tracer.look()
    assert "folder" in line.trace


def test_the_scripts_own_profiler_comes_first(
    tracer: Tracer, line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = _long_look(tracer, monkeypatch)
    _until(lambda: tracer._is_on)

    tf.profiler.experimental.start(str(tmp_path / "theirs"))
    line_steps = line.steps
    _until(lambda: line.steps > line_steps + 5)
    tf.profiler.experimental.stop()
    looks.join()

    assert list(tmp_path.glob("theirs/plugins/profile/*/*.xplane.pb"))
    assert line.trace == {"why": "the script uses TensorFlow's profiler itself"}
    line.trace = {}
    tracer.look()
    assert line.trace == {}


def test_a_profiler_that_was_started_before_is_left_alone(
    tracer: Tracer, line: Line, tmp_path: Path
) -> None:
    tf.profiler.experimental.start.stoker_original(str(tmp_path / "theirs"))
    try:
        tracer.look()
    finally:
        tf.profiler.experimental.stop()

    assert line.trace == {"why": "another profiler is running"}
    assert list(tmp_path.glob("theirs/plugins/profile/*/*.xplane.pb"))


def test_the_end_of_the_process_keeps_what_there_is(
    tracer: Tracer, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = _long_look(tracer, monkeypatch)
    begun = line.steps
    _until(lambda: tracer._is_on and line.steps > begun + 10)

    begun_s = time.monotonic()
    tracer.at_exit()

    assert time.monotonic() - begun_s < 10
    assert "folder" in line.trace
    looks.join()


def test_a_trace_ends_with_the_pass_over_the_data(
    tracer: Tracer, line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = _long_look(tracer, monkeypatch)
    begun = line.steps
    _until(lambda: tracer._is_on and line.steps > begun + 10)

    line.passes += 1
    looks.join(10)

    assert not looks.is_alive()
    assert "folder" in line.trace


def _long_look(tracer: Tracer, monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
    """A thread in which the tracer takes a trace of 20 s."""
    monkeypatch.setattr(device_trace, "MIN_S", 20.0)
    monkeypatch.setattr(device_trace, "MAX_S", 20.0)
    looks = threading.Thread(target=tracer.look)
    looks.start()
    return looks


def _until(so: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 20
    while not so():
        assert time.monotonic() < end_s
        time.sleep(0.01)  # another thread gets there


def test_a_trace_that_is_lost_or_damaged_is_one_line(tmp_path: Path) -> None:
    trace = {"folder": "trace-1", "layers": []}
    assert _device(trace, tmp_path) == {"why": "TensorFlow's profiler wrote no trace"}

    (tmp_path / "trace-1/plugins/profile/now").mkdir(parents=True)
    file = tmp_path / "trace-1/plugins/profile/now/host.xplane.pb"
    file.write_bytes(resnet_step().bytes()[:700])
    assert "damaged" in _device(trace, tmp_path)["why"]
    file.write_bytes(b"")
    assert _device(trace, tmp_path) == {"why": "the trace is empty"}
    file.write_bytes(resnet_step().bytes())
    assert _device({"why": "another profiler is running"}, tmp_path) == {
        "why": "another profiler is running"
    }


@pytest.fixture
def device() -> DeviceTime:
    """Transposes around a normalization, as a GPU runs it."""
    return device_time(
        read_events(resnet_step().bytes()),
        layers={"conv1": "Conv2D", "norm1": "BatchNormalization"},
    )


def profiled(*loops: Any) -> ScriptProfile:
    found = diagnose([watched(*loops, gpus=1)], MACHINE)
    return ScriptProfile(
        command=("python", "train.py"),
        exit_code=0,
        ended_by="itself",
        wall_s=1.0,
        tensorflow="2.21.0",
        keras="3.15.1",
        backend="tensorflow",
        gpus=1,
        peak_memory_bytes=0,
        gpu_peak_bytes=(),
        gpu_states=(),
        loops=loops,
        findings=found.findings,
        minor=found.minor,
        failures=(),
    )


def test_the_class_that_costs_most_is_the_first_finding_with_its_layers_line(
    device: DeviceTime,
) -> None:
    trace = {
        "folder": "trace-1",
        "layers": [["norm1", "BatchNormalization", "/home/me/train.py", 7]],
    }
    trained = fit(
        device=device,
        trace=trace,
        real_s=0.02,
        wait=0.5,
        reached=Reached(operations=4e8, peak_per_s=1e12),
    )

    first, *others = profiled(trained).findings

    assert others, "this input is waited for, which costs more"
    assert (first.kind, first.place) == ("device_time", at(7))
    assert first.observation == (
        "38% of the step is layout transposes, 38% around layers of type BatchNormalization, "
        "most in norm1 (38%); MFU 2.0%"
    )
    assert first.gain_text() == "at most 1.6x"
    assert "TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT" in first.change


def test_of_a_layer_whose_line_is_not_known_the_loop_is_named(device: DeviceTime) -> None:
    (first, *_) = profiled(loop(device=device)).findings

    assert (first.kind, first.place) == ("device_time", at(40))


def test_the_page_and_the_json_have_the_devices_time(device: DeviceTime) -> None:
    profile = profiled(fit(device=device))
    text = page_html(profile)

    assert "Where the device&#x27;s time goes" in text
    assert "<title>layout transposes: 38.0%</title>" in text
    result = profile.to_json()["loops"][0]
    assert sum(result["device_time"]["shares"].values()) == pytest.approx(1.0)
    (said,) = [text for name, text in profile.machine() if name.startswith("device time")]
    assert said.startswith("layout transposes 38%, convolution and matrix product 30%")


def test_the_reason_for_a_missing_one_is_reported() -> None:
    without = replace(fit(), no_device="another profiler is running")
    profile = profiled(without)

    assert "Not measured: another profiler is running." in page_html(profile)
    assert ("device time in train.py:40", "not measured: another profiler is running") in (
        profile.machine()
    )
    assert profile.to_json()["loops"][0]["device_time_not_measured"] == (
        "another profiler is running"
    )
