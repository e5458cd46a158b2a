"""Takes a short trace of the devices through TensorFlow's own profiler (CUPTI on a GPU).

A trace that fails does not affect training; the reason is reported in one line.
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
"""Environment variable for tests: if it is 1 and no GPU is visible, the CPU is traced, and its
operations are treated as kernels."""

_HOST_LEVEL_OF_OPERATIONS = 2
"""Value of the profiler's option `host_tracer_level` that records each TensorFlow operation."""


def traces_cpu() -> bool:
    """Whether CPU operations are treated as kernels."""
    return os.environ.get(STAND_IN) == "1" and not tf.config.get_visible_devices("GPU")


def can_trace() -> bool:
    """Whether there is a device to trace."""
    return bool(tf.config.get_visible_devices("GPU")) or traces_cpu()


class DeviceTrace:
    """A trace in progress; a process can have only one at a time."""

    def __init__(self, folder: Path | None = None) -> None:
        """Start the trace.

        Args:
            folder: The trace is written to a new subfolder of this one, which is removed at the end;
                by default, to the system's temporary folder.

        Raises:
            TraceError: the profiler did not start, e.g. because another one is running; or the folder
                cannot be written.
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
        """End the trace, and remove its folder.

        Returns:
            The content of the trace's file.

        Raises:
            TraceError: the profiler failed, or wrote no trace.
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
    """Trace the devices during a `with` block.

    Yields:
        A list; after the block, it contains the content of the trace's file.

    Raises:
        TraceError: the trace did not start, so the block did not run; or it failed after the block.
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
    """Split the device time of a trace by kernel class, kernel and layer.

    Args:
        data: The content of the trace's file.
        layers: Path of each of the model's layers -> its type; empty if unknown.

    Raises:
        TraceError: the trace is damaged, or has no events of a device.
    """
    of_cpu = traces_cpu()
    return device_time(read_events(data, of_cpu=of_cpu), layers=layers, of_cpu=of_cpu)


def _first(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
