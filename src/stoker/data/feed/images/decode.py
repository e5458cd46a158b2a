"""Types of the decoders: encoded images in files -> one uint8 batch, in one call without the GIL.

`exact` batches equal the exported graph's result for the same bytes. The others are for training crops:
only the box is decoded, a JPEG at the smallest scale that is large enough for the result, and images are
smoothed when they become smaller (antialias).
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
"""One image of a batch; `struct job` in decode.c describes each field."""


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
"""Status -> what the error says was received."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Size and form of every decoded image of a batch."""

    height: int
    """Pixels."""

    width: int
    """Pixels."""

    channels: int
    """1 (gray) or 3 (RGB)."""

    exact: bool
    """Whether it must equal the exported graph's result."""

    antialias: bool
    """Whether images are smoothed when they become smaller, as by `tf.image.resize`."""


DecodeWhole = Callable[[bytes, int], NDArray[np.uint8]]
"""Encoded bytes and channels -> [height, width, channels], upright, by the exported graph's operations.
It decodes formats for which an engine has no decoder, and raises ValueError if it cannot."""


class Engine(Protocol):
    """A way to decode a batch."""

    name: str
    """native or opencv."""

    def decode(self, jobs: NDArray[np.void], target: Target) -> NDArray[np.uint8]:
        """Decode a batch, and set each job's `status`.

        Args:
            jobs: [batch] `JOB`, their files open.
            target: Size and form of the result.

        Returns:
            [batch, height, width, channels]; undefined where a status is not DONE.
        """


def empty_batch(images: int, target: Target) -> NDArray[np.uint8]:
    """Allocate a batch, aligned so that TensorFlow uses it without a copy.

    Source: TensorFlow, python/lib/core/py_func.cc, which asks for Eigen's alignment.
    """
    shape = (images, target.height, target.width, target.channels)
    size = math.prod(shape)
    room = np.empty(size + _ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT_BYTES
    return room[start : start + size].reshape(shape)


_ALIGNMENT_BYTES = 64


def read_job(job: np.void) -> bytes | Status:
    """Return the bytes of one image, or why they cannot be used."""
    length = int(job["length"])
    if job["data"]:
        # Already in memory, owned by the caller.
        return ctypes.string_at(int(job["data"]), length)
    try:
        data = os.pread(int(job["file"]), length, int(job["offset"]))
    except OSError:
        return Status.CUT
    if len(data) < length:
        return Status.CUT
    return data if google_crc32c.value(data) == job["crc32c"] else Status.DAMAGED
