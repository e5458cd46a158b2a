"""TensorBoard's event files, without TensorFlow.

The `tensorboard` package has a writer too; it imports TensorFlow to open a file, computes its
checksums in Python (0.15 s per MiB, which a graph has), and a full disk ends its thread for good.

Source: tensorboard/compat/proto/event.proto; tensorflow/core/lib/io/record_writer.h (framing).
"""

from __future__ import annotations

import os
import re
import socket
import struct
import time
from pathlib import Path

import google_crc32c
from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata

from stoker.telemetry.writers.appended import AppendedFile

_PREFIX = "events.out.tfevents."


class EventFile:
    """Takes events; each is in the file when `add` returns."""

    def __init__(self, folder: Path) -> None:
        """Make a new file in a folder: TensorBoard reads all of them in their names' order."""
        # TensorBoard's time axis is wall-clock time by its format. It is read once: a clock that is
        # set while training runs then moves nothing.
        self._began_s = time.time() - time.monotonic()
        name = f"{_PREFIX}{_after_all(folder):017.6f}.{socket.gethostname()}.{os.getpid()}"
        self._file = AppendedFile(folder / name)
        self.add(
            Event(file_version="brain.Event:2", source_metadata=SourceMetadata(writer="stoker"))
        )

    def add(self, event: Event) -> None:
        """Append one event, stamped with the time."""
        event.wall_time = self._began_s + time.monotonic()
        self._file.append(framed(event.SerializeToString()))

    def rewind(self, step: int) -> None:
        """Let readers forget what earlier files hold for later steps."""
        self.add(Event(step=step + 1, session_log=SessionLog(status=SessionLog.START)))

    def close(self) -> None:
        """Flush to the disk and close."""
        self._file.close()


def _after_all(folder: Path) -> float:
    """Now, but later than every file of the folder says, whatever was done to the clock."""
    names = (path.name.removeprefix(_PREFIX) for path in folder.glob(f"{_PREFIX}*"))
    stamps = [float(match[0]) for name in names if (match := re.match(r"\d+(\.\d+)?", name))]
    return max([time.time(), *(stamp + 1e-3 for stamp in stamps)])


def framed(payload: bytes) -> bytes:
    """A payload as a TFRecord: length, its check, payload, its check; all little-endian."""
    length = struct.pack("<Q", len(payload))
    return length + _masked_crc(length) + payload + _masked_crc(payload)


def _masked_crc(data: bytes) -> bytes:
    crc = google_crc32c.value(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)
