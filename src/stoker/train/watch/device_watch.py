"""Reports how a run's devices spend their time: MFU after the first calls, and a short trace.

Both are measured once per run and cost little. MFU takes at most a second, between two calls. A separate
thread takes and reads the trace while calls continue. If the run continues with another step (compiled by
XLA, or a smaller one), the new step is traced. Neither changes a step, and a failure is only reported in one
line.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import keras

from stoker.core.threads import outlives_python
from stoker.measure.device_events import TraceError
from stoker.measure.device_time import DeviceTime
from stoker.measure.device_trace import DeviceTrace, can_trace, time_in
from stoker.measure.findings import StepFacts, device_finding
from stoker.measure.mfu import ModelRate, PeakFile, model_rate
from stoker.telemetry.catalogue import training as catalogue
from stoker.telemetry.wall_time import WallTime
from stoker.train.model.keras_model import layer_types

_LOG = logging.getLogger(__name__)

PEAKS = "peaks.json"
"""Name of the file with the measured peak rates, in the folder of the stage `train`."""

WARM_CALLS = 2
"""Number of calls before MFU and trace are measured: these calls trace, compile and fill buffers. The number is
small because a run may have few calls: a call has up to 50 steps, or a whole epoch."""

CALLS_IN_TURN = 1
"""Number of additional calls before a changed step is traced: while two forms of the step take turns, each of
them runs at most `WARM_CALLS` times in a row."""

TRACED_STEPS = 5
"""Number of steps in a trace, if they fit in its maximum length."""

MIN_TRACE_S, MAX_TRACE_S = 0.3, 2.0
"""Minimum and maximum length of a trace, seconds: enough for many steps of a small model, or a few of a large
one."""

LONGEST_END_S = 20.0
"""Maximum time to wait at the end of a run until the trace is read, seconds."""


class _Trace(threading.Thread):
    """A thread that takes a trace, and reads it."""

    def __init__(self, length_s: float, model: keras.Model) -> None:
        super().__init__(name="device-trace", daemon=True)
        self._length_s, self._model = length_s, model
        self.ended, self.free = threading.Event(), threading.Event()
        """`ended` is set to end the trace; `free` is set when another profiler can start."""
        self.cancelled = False
        self.found: DeviceTime | None = None
        self.why = ""
        self.took_s = 0.0

    def run(self) -> None:
        begun_s = time.monotonic()
        try:
            try:
                trace = DeviceTrace()
                self.ended.wait(self._length_s)
                data = trace.stop()
            finally:
                self.free.set()
            if not self.cancelled:
                self.found = time_in(data, layers=layer_types(self._model))
        except TraceError as error:
            self.why = str(error)
            _LOG.warning("the device's time by kernel is not known: %s", error)
        except Exception as error:  # noqa: BLE001 - see below
            # Training must continue, even if the trace has content that was not foreseen.
            self.why = f"the trace cannot be read ({type(error).__name__}: {error})"
            _LOG.exception("the device's time by kernel is not known")
        self.took_s = time.monotonic() - begun_s


class DeviceWatch:
    """Measures the devices of a run."""

    def __init__(
        self, folder: Path, *, replicas: int, forbidden: str = "", wall: WallTime | None = None
    ) -> None:
        """Set what the watch may do.

        Args:
            folder: Folder of the stage `train`; receives the file of peak rates.
            replicas: Number of devices that compute together.
            forbidden: Why no trace may be taken; empty if a trace may be taken.
            wall: Accounts for the time that the measurements take.
        """
        self._peaks = PeakFile(folder / PEAKS)
        self._replicas, self._why = replicas, forbidden
        self._wall = wall or WallTime()
        self._rate: ModelRate | None = None
        self._model: keras.Model | None = None
        self._inputs: Callable[[], Any] = lambda: None
        self._per_epoch = 1
        self._calls = 0
        self._call_begun_s = self._step_s = 0.0
        self._trace: _Trace | None = None
        self._found: DeviceTime | None = None
        self._rate_s = self._trace_s = 0.0

    def begin(
        self, model: keras.Model, *, per_epoch: int, inputs: Callable[[], Any] = lambda: None
    ) -> None:
        """Call this when training starts or resumes.

        Args:
            model: The built and compiled model.
            per_epoch: Number of steps per epoch: the validation after an epoch is not traced.
            inputs: Returns the specs of a step's batch, for `count_flops`, because a model may not fix all
                sizes.
        """
        if can_trace():
            self._model, self._per_epoch, self._inputs = model, per_epoch, inputs

    def step_changed(self, *, stays: bool) -> None:
        """Call this if the next call runs another step, because a trace must not contain both steps.

        Args:
            stays: Whether the run continues with the new step, so that the new step is traced.
        """
        self._calls = -CALLS_IN_TURN
        if self._trace is not None:
            self._trace.cancelled = True
            self._trace.ended.set()
        if stays:
            self._found = None

    def before(self) -> None:
        """Call this before a call of steps; it may start the trace."""
        self._call_begun_s = time.monotonic()
        due = self._calls >= WARM_CALLS and self._rate is not None
        if due and self._model is not None and not self._why and self._is_missing():
            length_s = min(MAX_TRACE_S, max(MIN_TRACE_S, TRACED_STEPS * self._step_s))
            self._trace = _Trace(length_s, self._model)
            self._trace.start()
            outlives_python(self._trace, does="the trace of the device is read")

    def _is_missing(self) -> bool:
        """Return whether there is no trace, neither ended nor in progress; store the result of an ended one."""
        if self._trace is not None and not self._trace.is_alive():
            trace, self._trace = self._trace, None
            self._trace_s += trace.took_s
            if not trace.cancelled:
                self._found, self._why = trace.found, trace.why
        return self._trace is None and self._found is None and not self._why

    def after(self, step: int, *, steps: int) -> None:
        """Call this when a call of `steps` steps has ended at `step`; it may measure MFU, and end the trace."""
        if self._model is None:
            return
        self._calls += 1
        self._step_s = (time.monotonic() - self._call_begun_s) / max(1, steps)
        if step % self._per_epoch == 0 and self._trace is not None:
            self._trace.ended.set()
        if self._calls >= WARM_CALLS and self._rate is None:
            self._rate = self._measured_rate(self._model)

    def scalars(self, samples_per_s: float) -> Mapping[str, float]:
        """Return the metric MFU at this speed; empty if it is unknown."""
        mfu = self._mfu(samples_per_s)
        return {} if mfu is None else {catalogue.MFU.tensorboard: mfu}

    def release(self) -> None:
        """End a trace in progress, because another profiler starts; do not wait until the trace is read."""
        if self._trace is not None:
            self._trace.ended.set()
            self._trace.free.wait(LONGEST_END_S)

    def finish(self) -> None:
        """End a trace in progress, because the run ends, and wait until the trace is read."""
        if self._trace is not None:
            self._trace.ended.set()
            self._trace.join(LONGEST_END_S)
            self._is_missing()

    def facts(self, samples_per_s: float, step: StepFacts) -> dict[str, Any]:
        """The results, as JSON values.

        Args:
            samples_per_s: Mean number of samples per second of the whole run.
            step: Facts about the run's steps; the MFU is added to them.
        """
        self.finish()
        if self._model is None:
            return {"mfu": None, "device_time": None}
        # After very few calls, the MFU is not measured yet: measure it now.
        rate = self._rate = self._rate or self._measured_rate(self._model)
        mfu = self._mfu(samples_per_s)
        facts = {
            "mfu": mfu,
            "model_rate": rate.to_json(devices=self._replicas),
            "device_time": None if self._found is None else self._found.to_json(),
            "device_time_not_measured": self._why or ("" if self._found else "too few calls"),
            "device_watch_s": {"mfu": self._rate_s, "trace": self._trace_s},
        }
        if self._found is None:
            return facts
        finding = device_finding(self._found, step.with_mfu(mfu))
        return facts | {"device_finding": None if finding is None else finding.to_json()}

    def _measured_rate(self, model: keras.Model) -> ModelRate:
        begun_s = time.monotonic()
        with self._wall.within("measuring"):
            rate = model_rate(model, rates=self._peaks.rates, inputs=self._inputs())
        self._rate_s = time.monotonic() - begun_s
        return rate

    def _mfu(self, samples_per_s: float) -> float | None:
        return None if self._rate is None else self._rate.mfu(samples_per_s, devices=self._replicas)


def forbids_trace(callbacks: Iterable[keras.callbacks.Callback], *, profile: str | None) -> str:
    """Return why no trace may be taken; empty if a trace may be taken.

    A process can run only one profiler at a time, and the user's profiler takes precedence.

    Args:
        callbacks: The user's callbacks.
        profile: The setting `train.tensorboard.profile`.
    """
    if profile is not None:
        return "train.tensorboard.profile asks for a profile of its own"
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, keras.callbacks.TensorBoard):
            # Without steps to profile, the callback does not use the profiler.
            if getattr(callback, "_should_trace", True):
                return f"the callback {name} profiles steps itself"
        elif _speaks_of_profiler(type(callback)):
            return f"the callback {name} uses TensorFlow's profiler"
    return ""


def _speaks_of_profiler(kind: type) -> bool:
    module = sys.modules.get(kind.__module__)
    if module is None or kind.__module__.startswith("keras."):
        return False
    try:
        return "profiler" in inspect.getsource(module)
    except (OSError, TypeError):
        return True
