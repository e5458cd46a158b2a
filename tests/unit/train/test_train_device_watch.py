"""A run's devices: MFU after its first calls, one trace in its first epoch, and who comes first."""

from __future__ import annotations

import logging
import threading
from functools import partial
from pathlib import Path
from typing import Any

import keras
import pytest
import tensorflow as tf
from tests.unit.train import profiling_callback

from stoker.measure.device_time import DeviceTime
from stoker.measure.device_trace import STAND_IN, time_in
from stoker.measure.findings import StepFacts
from stoker.telemetry.catalogue import training as catalogue
from stoker.telemetry.wall_time import WallTime
from stoker.train.watch import device_watch
from stoker.train.watch.device_watch import PEAKS, DeviceWatch, forbids_trace
from stoker.train.watch.progress_line import ProgressLine

FACTS = StepFacts(of_script=False, precision="float32", xla=False, input_wait=0.0)


class Training:
    """Calls of four steps each, as the loop makes them."""

    def __init__(self, watch: DeviceWatch, *, per_epoch: int = 1000) -> None:
        self.model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, name="one")])
        self.watch, self.step = watch, 0
        self._run = tf.function(lambda rows: tf.reduce_sum(self.model(rows, training=True)))
        watch.begin(self.model, per_epoch=per_epoch)

    def calls(self, number: int) -> None:
        for _ in range(number):
            self.watch.before()
            for _ in range(4):
                self._run(tf.ones([256, 64])).numpy()
            self.step += 4
            self.watch.after(self.step, steps=4)

    def until_traced(self) -> None:
        while self.watch._found is None:
            self.calls(1)
            assert (self.watch._why, self.step < 20_000) == ("", True)


@pytest.fixture(autouse=True)
def _of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(STAND_IN, "1")


def test_mfu_is_known_after_the_first_calls_and_a_trace_is_taken_once(tmp_path: Path) -> None:
    watch = DeviceWatch(tmp_path, replicas=1)
    training = Training(watch)

    training.calls(1)
    assert watch.scalars(1e4) == {}
    training.calls(1)
    mfu = watch.scalars(1e4)[catalogue.MFU.tensorboard]
    assert mfu > 0
    assert watch.scalars(2e4)[catalogue.MFU.tensorboard] == pytest.approx(2 * mfu)
    training.until_traced()

    facts = watch.facts(1e4, FACTS)
    assert facts["mfu"] == pytest.approx(mfu)
    assert facts["device_time"]["of_cpu"]
    assert facts["device_time"]["shares"]["products"] > 0
    assert facts["device_time_not_measured"] == ""
    assert [each["layer"] for each in facts["device_time"]["layers"]] == ["one"]
    assert facts["device_watch_s"]["trace"] > 0
    assert (tmp_path / PEAKS).is_file()


def test_of_several_devices_the_peak_is_that_of_all(tmp_path: Path) -> None:
    found = []
    for replicas in (1, 2):
        watch = DeviceWatch(tmp_path, replicas=replicas, forbidden="not here")
        Training(watch).calls(2)
        found.append(watch.scalars(1e4)[catalogue.MFU.tensorboard])

    assert found[0] == pytest.approx(2 * found[1])


def test_without_a_gpu_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(STAND_IN)
    if tf.config.list_physical_devices("GPU"):
        pytest.skip("there is a GPU")
    watch = DeviceWatch(tmp_path, replicas=1)
    Training(watch).calls(5)

    assert watch.scalars(1e4) == {}
    assert watch.facts(1e4, FACTS) == {"mfu": None, "device_time": None}
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_one_call_has_its_mfu_at_the_end(tmp_path: Path) -> None:
    watch = DeviceWatch(tmp_path, replicas=1)
    Training(watch).calls(1)

    facts = watch.facts(1e4, FACTS)

    assert facts["mfu"] > 0
    assert facts["device_time"] is None
    assert facts["device_time_not_measured"] == "too few calls"


def test_a_run_of_three_calls_has_its_trace(tmp_path: Path) -> None:
    """As ResNet-50's on an H200: a call was an epoch of 36 steps, and the third one was the last."""
    watch = DeviceWatch(tmp_path, replicas=1)
    training = Training(watch)

    training.calls(2)
    assert watch._trace is None
    training.calls(1)
    assert watch._trace is not None
    watch.finish()


def test_measuring_has_a_part_of_the_wall_time_of_its_own(tmp_path: Path) -> None:
    """Whatever part the caller is in, and at the end of a run of few calls too."""
    wall = WallTime()
    with wall.within("tensorboard"):
        watch = DeviceWatch(tmp_path, replicas=1, wall=wall)
        Training(watch).calls(1)
        watch.facts(1e4, FACTS)

    assert wall.parts()["measuring"] > 0.9 * watch._rate_s > 0


def test_the_step_that_the_run_ends_with_is_traced(tmp_path: Path) -> None:
    watch = DeviceWatch(tmp_path, replicas=1)
    training = Training(watch)
    training.until_traced()
    first = watch._found

    # A call of another step between two of this one: what is known stays.
    watch.step_changed(stays=False)
    training.calls(2)
    assert watch._found is first is not None
    watch.step_changed(stays=True)
    assert watch.facts(1e4, FACTS)["device_time"] is None
    assert watch.facts(1e4, FACTS)["device_time_not_measured"] == "too few calls"
    training.until_traced()

    assert watch.facts(1e4, FACTS)["device_time"] is not None
    assert watch._found is not first


def test_no_trace_holds_two_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As both forms take turns, none begins; one that has begun is dropped."""
    monkeypatch.setattr(device_watch, "MIN_TRACE_S", 60.0)
    monkeypatch.setattr(device_watch, "MAX_TRACE_S", 60.0)
    watch = DeviceWatch(tmp_path, replicas=1)
    training = Training(watch)
    training.calls(4)
    begun = watch._trace
    assert begun is not None

    for _ in range(3):
        watch.step_changed(stays=False)
        training.calls(2)
    begun.join(20)

    assert (begun.cancelled, begun.found) == (True, None)
    assert watch._trace is begun
    monkeypatch.setattr(device_watch, "MAX_TRACE_S", 0.3)
    training.until_traced()
    assert watch.facts(1e4, FACTS)["device_time"] is not None


def test_sizes_that_the_model_leaves_open_are_those_of_the_batch(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((None, 64)), keras.layers.Dense(4)])
    for size, known in ((None, False), (7, True)):
        watch = DeviceWatch(tmp_path, replicas=1, forbidden="not here")
        watch.begin(model, per_epoch=9, inputs=partial(tf.TensorSpec, [32, size, 64]))
        assert (watch.facts(1e4, FACTS)["mfu"] is not None) == known


def test_a_profiler_that_runs_costs_the_trace_and_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tf.profiler.experimental.start(str(tmp_path / "theirs"))
    watch = DeviceWatch(tmp_path, replicas=1)
    with caplog.at_level(logging.WARNING):
        Training(watch).calls(4)
        watch.finish()
    tf.profiler.experimental.stop()

    facts = watch.facts(1e4, FACTS)
    assert facts["device_time"] is None
    assert facts["device_time_not_measured"] == "another profiler is running"
    assert [record.message for record in caplog.records if "device" in record.message] == [
        "the device's time by kernel is not known: another profiler is running"
    ]
    assert list(tmp_path.glob("theirs/plugins/profile/*/*.xplane.pb"))


def test_a_trace_ends_with_the_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_watch, "MIN_TRACE_S", 60.0)
    monkeypatch.setattr(device_watch, "MAX_TRACE_S", 60.0)
    watch = DeviceWatch(tmp_path, replicas=1)
    training = Training(watch, per_epoch=40)
    training.calls(10)
    assert watch._trace is not None

    watch._trace.join(20)

    assert not watch._trace.is_alive()


def test_who_wants_the_profiler_ends_the_trace_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_watch, "MIN_TRACE_S", 60.0)
    monkeypatch.setattr(device_watch, "MAX_TRACE_S", 60.0)
    read = threading.Event()

    def slowly(data: bytes, **given: Any) -> DeviceTime:
        assert read.wait(20)
        return time_in(data, **given)

    monkeypatch.setattr(device_watch, "time_in", slowly)
    watch = DeviceWatch(tmp_path, replicas=1)
    Training(watch).calls(4)

    watch.release()

    # It is free before our trace is read.
    tf.profiler.experimental.start(str(tmp_path / "theirs"))
    tf.profiler.experimental.stop()
    read.set()
    assert watch.facts(1e4, FACTS)["device_time"] is not None


def test_the_users_own_profiles_forbid_a_trace() -> None:
    board = keras.callbacks.TensorBoard
    plain: list[Any] = [keras.callbacks.EarlyStopping(), board("x")]

    assert forbids_trace([], profile=None) == ""
    assert forbids_trace(plain, profile=None) == ""
    assert "train.tensorboard.profile" in forbids_trace([], profile="3:5")
    assert "TensorBoard profiles" in forbids_trace([board("x", profile_batch=3)], profile=None)
    assert "profiling_callback" not in forbids_trace([], profile=None)
    assert "Profiles uses TensorFlow's profiler" in forbids_trace(
        [profiling_callback.Profiles()], profile=None
    )


@pytest.mark.parametrize(("mfu", "shown"), [(0.0415, "4.2%"), (0.41, "41%"), (0.0999, "10%")])
def test_the_line_shows_u_and_mfu(mfu: float, shown: str) -> None:
    line = ProgressLine(steps=10, epochs=1, monitor="val_loss")
    scalars = {catalogue.BUSY_FRACTION.tensorboard: 1.02, catalogue.MFU.tensorboard: mfu}

    assert f"U 100%, MFU {shown}" in line(step=1, epoch=0, scalars=scalars)
    assert "MFU" not in ProgressLine(steps=10, epochs=1, monitor="loss")(
        step=1, epoch=0, scalars={catalogue.BUSY_FRACTION.tensorboard: 1.0}
    )
