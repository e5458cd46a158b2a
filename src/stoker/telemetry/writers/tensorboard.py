"""Writes a folder for TensorBoard: `tensorboard --logdir FOLDER` shows it while training runs.

FOLDER/train/       loss and speed at each interval, `epoch_*` after each epoch, histograms, the graph
FOLDER/validation/  `epoch_*` of the eval split: with the same names, both splits are lines of the same chart
FOLDER/             settings and results (HParams, text), embeddings (projector), profiles
"""

from __future__ import annotations

import json
import os
import re
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata
from tensorboard.compat.proto.summary_pb2 import Summary

from stoker.telemetry.catalogue import training as catalogue
from stoker.telemetry.writers.append_only import AppendedFile, DiskFailures
from stoker.telemetry.writers.summaries import (
    Embedding,
    Histogram,
    histogram_value,
    session_end,
    session_start,
    text_value,
    write_projector,
)

_PREFIX = "events.out.tfevents."


class EventFile:
    """Appends events to a file; an event is in the file when `add` returns."""

    def __init__(self, folder: Path) -> None:
        """Create a new file in a folder; TensorBoard reads all files in a folder in the order of their names."""
        # TensorBoard's time axis is wall-clock time. The wall clock is read only once, so setting it during
        # training has no effect.
        self._began_s = time.time() - time.monotonic()
        name = f"{_PREFIX}{_after_all(folder):017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(folder / name)
        self.add(
            Event(file_version="brain.Event:2", source_metadata=SourceMetadata(writer="stoker"))
        )

    def add(self, event: Event) -> None:
        """Append an event with the current time."""
        event.wall_time = self._began_s + time.monotonic()
        self._file.append(framed(event.SerializeToString()))

    def rewind(self, step: int) -> None:
        """Make readers drop the values of later steps from earlier files."""
        self.add(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        """Flush to the disk and close."""
        self._file.close()


def _after_all(folder: Path) -> float:
    """Return a time for a new file's name: now, but later than all files in the folder even if the clock was set back."""
    names = (path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*"))
    stamps = [float(match[0]) for name in names if (match := re.match(r"\d+(\.\d+)?", name))]
    return max([time.time(), *(stamp + 1e-3 for stamp in stamps)])


def framed(payload: bytes) -> bytes:
    """Return a payload as a TFRecord: length, its checksum, payload, its checksum; all little-endian."""
    length = struct.pack("<Q", len(payload))
    return length + _masked_crc(length) + payload + _masked_crc(payload)


def _masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


_VALIDATION = "val_"
_EPOCH = "epoch_"


class TensorBoard:
    """Writes event files in a background thread: training does not wait for them.

    If the process is killed, the queued events are lost; written events are complete.
    """

    def __init__(self, folder: Path) -> None:
        """Create the three event files: for the run, the training, and the validation.

        Raises:
            UserError: The files cannot be created.
        """
        self.folder = folder
        self._run = EventFile(folder)
        self._train = EventFile(folder / "train")
        self._validation = EventFile(folder / "validation")
        self._behind = Behind("tensorboard")
        self._projector = DiskFailures(f"{folder}: the projector's embeddings")

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the scalars of an interval of steps, or, if they contain `epoch`, of an epoch."""
        kept = dict(scalars)
        self._behind.do(lambda: self._write(step, kept))

    def _write(self, step: int, scalars: Mapping[str, float]) -> None:
        if catalogue.EPOCH.tensorboard not in scalars:
            self._train.add(_scalars(step, scalars))
            return
        # These are the names that Keras's own TensorBoard callback uses.
        training = {
            name if name == catalogue.EPOCH.tensorboard else _EPOCH + name: value
            for name, value in scalars.items()
            if not name.startswith(_VALIDATION)
        }
        validation = {
            _EPOCH + name.removeprefix(_VALIDATION): value
            for name, value in scalars.items()
            if name.startswith(_VALIDATION)
        }
        self._train.add(_scalars(step, training))
        self._validation.add(_scalars(step, validation))

    def rewind(self, step: int, *, validated: bool = True) -> None:
        """Make TensorBoard drop the values that a killed run wrote for later steps.

        It can only drop whole steps: if the metrics of an epoch are dropped, the metrics of its last call are too.
        """
        for file in self._files:
            self._behind.do(partial(file.rewind, step if validated else step - 1))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Add histograms by tag, e.g. `weights/dense/kernel`."""
        kept = dict(histograms)

        def write() -> None:
            values = [histogram_value(tag, histogram) for tag, histogram in kept.items()]
            self._train.add(Event(step=step, summary=Summary(value=values)))

        self._behind.do(write)

    def graph(self, graph_def: Callable[[], bytes]) -> None:
        """Add the graph of a step.

        Args:
            graph_def: Returns the serialized GraphDef; called in the background thread.
        """
        self._behind.do(lambda: self._train.add(Event(graph_def=graph_def())))

    def embeddings(self, embeddings: Sequence[Embedding]) -> None:
        """Show these vectors in the projector instead of the previous ones."""

        def write() -> None:
            with self._projector:
                write_projector(self.folder, embeddings)

        self._behind.do(write)

    def settings(self, settings: Mapping[str, Any], *, run: str) -> None:
        """Add a run's settings: as a row of the HParams table, and as a text.

        Args:
            settings: Nested settings.
            run: ID of the run.
        """
        text = json.dumps(settings, indent=2, default=str)
        started = session_start(settings, run=run)
        value = text_value("settings", f"```json\n{text}\n```")
        self._behind.do(lambda: self._run.add(Event(summary=started)))
        self._behind.do(lambda: self._run.add(Event(summary=Summary(value=[value]))))

    def results(self, step: int, metrics: Mapping[str, float], *, succeeded: bool) -> None:
        """Add the final metrics of the run and its outcome, for the HParams table."""
        best = {f"best/{name}": value for name, value in metrics.items()}
        ended = Event(step=step, summary=Summary(value=[session_end(succeeded=succeeded)]))
        self._behind.do(lambda: self._run.add(_scalars(step, best)))
        self._behind.do(lambda: self._run.add(ended))

    def wait(self) -> None:
        """Wait until all queued events have been passed to the operating system."""
        self._behind.wait()

    def close(self) -> None:
        """Write the queued events, flush, and close the files."""
        try:
            self._behind.close()
        finally:
            for file in self._files:
                file.close()

    @property
    def _files(self) -> tuple[EventFile, ...]:
        return (self._run, self._train, self._validation)


def _scalars(step: int, scalars: Mapping[str, float]) -> Event:
    values = [Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
    return Event(step=step, summary=Summary(value=values))


PAUSE_S = 0.2
"""Interval at which the thread checks for tasks, seconds. Waking the thread for each task would make a call of a single
short step 5 % longer."""

MAX_WAITING = 10_000
"""Maximum number of queued tasks. If the disk does not respond, `do` then waits, so that memory does not grow."""

Piece = Callable[[], None]


class Behind:
    """Runs tasks in order in a background thread.

    If a task raises an exception, the next `do`, `wait` or `close` raises it.
    """

    def __init__(self, name: str) -> None:
        """Start the thread.

        Args:
            name: Name of the thread.
        """
        self._pieces: deque[Piece] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def do(self, piece: Piece) -> None:
        """Queue a task; it runs after all earlier tasks, within about 0.2 seconds if none is queued.

        Raises:
            ValueError: `close` was called before.
        """
        if self._closing:
            raise ValueError("closed: no task can be added")
        self._raise()
        self._pieces.append(piece)
        if len(self._pieces) > MAX_WAITING:
            self.wait()

    def wait(self) -> None:
        """Wait until all queued tasks are done."""
        if self._thread.is_alive():
            done = threading.Event()
            self._pieces.append(done.set)
            self._wake.set()
            done.wait()
        self._raise()

    def close(self) -> None:
        """Run the queued tasks, and end the thread; a second call does nothing."""
        self._closing = True
        self._wake.set()
        self._thread.join()
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _work(self) -> None:
        while True:
            closing = self._closing
            while self._pieces:
                self._do(self._pieces.popleft())
            if closing:
                return
            self._wake.wait(PAUSE_S)
            self._wake.clear()

    def _do(self, piece: Piece) -> None:
        try:
            piece()
        except Exception as error:  # noqa: BLE001 - raised by the next call
            self._error = error
