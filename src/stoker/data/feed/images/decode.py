"""Types of the decoders: encoded images in files -> one uint8 batch, in one call without the GIL.

An `exact` batch equals the exported graph's result for the same bytes. Batches that are not exact are for
random training crops: only the box is decoded, a JPEG at the smallest scale that is large enough for the
result, and images are smoothed when they become smaller (antialias).
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
    """How a job ended; the same values as `enum status` in decode.c."""

    DONE = 0
    OTHER_FORMAT = 1
    CUT = 2
    DAMAGED = 3
    BROKEN = 4
    OTHER_SIZE = 5
    NO_MEMORY = 6


REASONS = {
    Status.CUT: "a file that ends before the image does, or cannot be read",
    Status.DAMAGED: "changed bytes: their CRC32C is not the one that ingest wrote down",
    Status.BROKEN: "bytes that no decoder can decode",
    Status.OTHER_SIZE: "an image of a different size than ingest found",
    Status.NO_MEMORY: "too little memory for the image",
}
"""Status -> what was received, for the error message."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Size and form of every decoded image of a batch."""

    height: int
    """Height, pixels."""

    width: int
    """Width, pixels."""

    channels: int
    """1 (gray) or 3 (RGB)."""

    exact: bool
    """Whether the batch must equal the exported graph's result."""

    antialias: bool
    """Whether images are smoothed when they become smaller, as by `tf.image.resize`."""


DecodeWhole = Callable[[bytes, int], NDArray[np.uint8]]
"""Function that decodes an image as the exported graph does: encoded bytes, channels -> [height, width,
channels], upright. Used for formats that an engine cannot decode; raises ValueError if it fails, too."""


class Engine(Protocol):
    """A decoder of batches."""

    name: str
    """`native` or `opencv`."""

    def decode(self, jobs: NDArray[np.void], target: Target) -> NDArray[np.uint8]:
        """Decode a batch, and set each job's `status`.

        Args:
            jobs: [batch] `JOB`; the files must be open.
            target: Size and form of the result.

        Returns:
            [batch, height, width, channels]; undefined where a status is not DONE.
        """


def empty_batch(images: int, target: Target) -> NDArray[np.uint8]:
    """Allocate a batch whose memory is aligned, so that TensorFlow uses it without a copy.

    Source: TensorFlow, python/lib/core/py_func.cc, which requires Eigen's alignment.
    """
    shape = (images, target.height, target.width, target.channels)
    size = math.prod(shape)
    room = np.empty(size + _ALIGNMENT_BYTES, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT_BYTES
    return room[start : start + size].reshape(shape)


_ALIGNMENT_BYTES = 64


def read_job(job: np.void) -> bytes | Status:
    """Return the bytes of one image, or the status that says why they cannot be used."""
    length = int(job["length"])
    if job["data"]:
        # The bytes are already in memory, which belongs to the caller.
        return ctypes.string_at(int(job["data"]), length)
    try:
        data = os.pread(int(job["file"]), length, int(job["offset"]))
    except OSError:
        return Status.CUT
    if len(data) < length:
        return Status.CUT
    return data if google_crc32c.value(data) == job["crc32c"] else Status.DAMAGED
