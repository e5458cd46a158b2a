"""One batch of images: bytes in files -> uint8, in one call that lets go of the interpreter's lock.

`exact` batches equal what the exported graph makes of the same bytes. The others are for training
crops: only the box is decoded, a JPEG at the smallest scale that is large enough for the result, and
what is made smaller is smoothed (antialias).
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import google_crc32c
import numpy as np
from numpy.typing import NDArray

JOB = np.dtype(
    [
        ("data", "<u8"),
        ("offset", "<i8"),
        ("length", "<i8"),
        ("file", "<i4"),
        ("crc32c", "<u4"),
        ("height", "<i4"),
        ("width", "<i4"),
        ("x", "<f4"),
        ("y", "<f4"),
        ("box_width", "<f4"),
        ("box_height", "<f4"),
        ("orientation", "<i4"),
        ("flip", "<i4"),
        ("status", "<i4"),
        ("unused", "<i4"),
    ],
)
"""One image of a batch; `struct job` in decode.c says what each field is."""


class Status(IntEnum):
    """How a job ended; `enum status` in decode.c."""

    DONE = 0
    OTHER_FORMAT = 1
    CUT = 2
    DAMAGED = 3
    BROKEN = 4
    OTHER_SIZE = 5
    NO_MEMORY = 6


REASONS = {
    Status.CUT: "the file ends before it, or cannot be read",
    Status.DAMAGED: "other bytes: the CRC32C that ingest wrote down does not hold",
    Status.BROKEN: "bytes that no decoder takes",
    Status.OTHER_SIZE: "an image of another size than ingest found",
    Status.NO_MEMORY: "too little memory for it",
}
"""What an error says was received."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """What every image of a batch becomes."""

    height: int
    """Pixels."""

    width: int
    """Pixels."""

    channels: int
    """1 (grey) or 3 (RGB)."""

    exact: bool
    """Whether it must equal what the exported graph makes of the bytes."""

    antialias: bool
    """Whether what is made smaller is smoothed; as `tf.image.resize` does it."""


DecodeWhole = Callable[[bytes, int], NDArray[np.uint8]]
"""Encoded bytes and channels -> [height, width, channels], upright, by the exported graph's own
operations. It decodes what an engine has no decoder for; a ValueError says that it cannot."""


class Engine(Protocol):
    """A way to decode a batch."""

    name: str
    """native or opencv."""

    def decode(self, jobs: NDArray[np.void], target: Target) -> NDArray[np.uint8]:
        """Decode a batch, and set each job's `status`.

        Args:
            jobs: [batch] `JOB`, their files open.
            target: What each becomes.

        Returns:
            [batch, height, width, channels]; where a status is not DONE anything.
        """
        ...


def empty_batch(images: int, target: Target) -> NDArray[np.uint8]:
    """Room for a batch, aligned so that TensorFlow takes it over without a copy.

    Source: TensorFlow, python/lib/core/py_func.cc, which asks for Eigen's alignment.
    """
    shape = (images, target.height, target.width, target.channels)
    size = math.prod(shape)
    room = np.empty(size + _ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT_BYTES
    return room[start : start + size].reshape(shape)


_ALIGNMENT_BYTES = 64


def read_job(job: np.void) -> bytes | Status:
    """The bytes of one image, or why they cannot be used."""
    length = int(job["length"])
    if job["data"]:
        # Read before, and held by whoever made the job.
        return ctypes.string_at(int(job["data"]), length)
    try:
        data = os.pread(int(job["file"]), length, int(job["offset"]))
    except OSError:
        return Status.CUT
    if len(data) < length:
        return Status.CUT
    return data if google_crc32c.value(data) == job["crc32c"] else Status.DAMAGED
