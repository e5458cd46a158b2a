"""Takes a short trace of the devices through TensorFlow's own profiler (CUPTI on a GPU).

If a trace fails, training is not affected: the reason is reported in one line.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import tensorflow as tf

from stoker.measure.device_events import TraceError, read_events
from stoker.measure.device_time import NO_LAYERS, DeviceTime, device_time

STAND_IN = "STOKER_TRACE_CPU"
"""Environment variable for tests: without a GPU, trace the CPU and treat its operations as
kernels."""

_HOST_LEVEL_OF_OPERATIONS = 2
"""Profiler option: the host's events include each TensorFlow operation."""


def traces_cpu() -> bool:
    """Whether CPU operations are treated as kernels."""
    return os.environ.get(STAND_IN) == "1" and not tf.config.get_visible_devices("GPU")


def can_trace() -> bool:
    """Whether there is a device to trace."""
    return bool(tf.config.get_visible_devices("GPU")) or traces_cpu()


class DeviceTrace:
    """A trace in progress; a process can have only one at a time."""

    def __init__(self, folder: Path | None = None) -> None:
        """Start it.

        Args:
            folder: Holds the trace until it ends, in a new subfolder; by default the system's
                temporary folder.

        Raises:
            TraceError: another profiler is running, or the folder cannot be written.
        """
        level = _HOST_LEVEL_OF_OPERATIONS if traces_cpu() else 1
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=level, python_tracer_level=0, device_tracer_level=1
        )
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=".device-trace-", dir=folder))
        except OSError as error:
            raise TraceError(f"the folder of the trace cannot be written ({error})") from None
        try:
            tf.profiler.experimental.start(str(self._folder), options=options)
        except tf.errors.AlreadyExistsError:
            self._remove()
            raise TraceError("another profiler is running") from None
        except (tf.errors.OpError, OSError) as error:
            self._remove()
            raise TraceError(f"TensorFlow's profiler did not start ({_first(error)})") from None

    def stop(self) -> bytes:
        """End it.

        Returns:
            The content of the trace's file.

        Raises:
            TraceError: no trace was written.
        """
        try:
            tf.profiler.experimental.stop()
            files = sorted(self._folder.glob("plugins/profile/*/*.xplane.pb"))
            if not files:
                raise TraceError("TensorFlow's profiler wrote no trace")
            return files[0].read_bytes()
        except (tf.errors.OpError, OSError) as error:
            raise TraceError(f"TensorFlow's profiler did not end ({_first(error)})") from None
        finally:
            self._remove()

    def _remove(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


@contextlib.contextmanager
def traced(folder: Path | None = None) -> Iterator[list[bytes]]:
    """Trace the body.

    Yields:
        A list that contains the trace's content at the end.

    Raises:
        TraceError: the trace failed; the body has run.
    """
    found: list[bytes] = []
    trace = DeviceTrace(folder)
    try:
        yield found
    except BaseException:
        with contextlib.suppress(TraceError):
            trace.stop()
        raise
    found.append(trace.stop())


def time_in(data: bytes, *, layers: Mapping[str, str] = NO_LAYERS) -> DeviceTime:
    """Split the device time of a trace.

    Args:
        data: The content of the trace's file.
        layers: Path of each of the model's layers -> its type.

    Raises:
        TraceError: the trace is damaged, or has no events of a device.
    """
    of_cpu = traces_cpu()
    return device_time(read_events(data, of_cpu=of_cpu), layers=layers, of_cpu=of_cpu)


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
