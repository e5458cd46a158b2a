"""The decoder that is written in C and compiled on this machine: one call decodes a batch in several threads."""

from __future__ import annotations

import ctypes
import functools
import tempfile
from dataclasses import replace
from pathlib import Path

import google_crc32c
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from stoker.core.native_build import NotBuilt, load_compiled
from stoker.data.feed.images.decode import (
    JOB,
    DecodeWhole,
    Status,
    Target,
    empty_batch,
    read_job,
)
from stoker.data.ingest.image_store import raw_bytes


class _Output(ctypes.Structure):
    """The result's size and form, with the fields of `struct output` in decode.c."""

    _fields_ = (
        ("pixels", ctypes.c_void_p),
        ("height", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("channels", ctypes.c_int32),
        ("exact", ctypes.c_int32),
        ("antialias", ctypes.c_int32),
    )


class NativeEngine:
    """Decoder in C for JPEG and raw pixels. Other formats are decoded by the exported graph, and resized in C."""

    name = "native"

    def __init__(self, decode_whole: DecodeWhole, *, threads: int) -> None:
        """Load the library; build it if it is missing.

        Raises:
            NotBuilt: the library cannot be built, or fails its check on a small image.
        """
        self._decode_whole = decode_whole
        self._threads = threads
        _check_library()

    def decode(self, jobs: NDArray[np.void], target: Target) -> NDArray[np.uint8]:
        """Decode a batch; see `Engine`."""
        pixels = _call(jobs, target, threads=self._threads)
        others = np.flatnonzero(jobs["status"] == Status.OTHER_FORMAT)
        if len(others):
            pixels[others] = self._decode_others(jobs, others, target)
        return pixels

    def _decode_others(
        self, jobs: NDArray[np.void], others: NDArray[np.intp], target: Target
    ) -> NDArray[np.uint8]:
        known = jobs[others]
        held = []
        for job in known:
            whole = self._whole(job, target)
            if isinstance(whole, Status):
                job["length"] = 0
                held.append((whole, b""))
                continue
            job["data"] = np.frombuffer(whole, np.uint8).ctypes.data
            job["length"], job["orientation"] = len(whole), 1
            held.append((Status.DONE, whole))
        pixels = _call(known, target, threads=self._threads)
        before = np.array([status for status, _ in held])
        jobs["status"][others] = np.where(before == Status.DONE, known["status"], before)
        return pixels

    def _whole(self, job: np.void, target: Target) -> bytes | Status:
        data = read_job(job)
        if isinstance(data, Status):
            return data
        try:
            return raw_bytes(self._decode_whole(data, target.channels))
        except ValueError:
            return Status.BROKEN


def _call(jobs: NDArray[np.void], target: Target, *, threads: int) -> NDArray[np.uint8]:
    pixels = empty_batch(len(jobs), target)
    output = _Output(
        pixels.ctypes.data,
        target.height,
        target.width,
        target.channels,
        target.exact,
        target.antialias,
    )
    load_library().stoker_decode(
        ctypes.c_void_p(jobs.ctypes.data), len(jobs), ctypes.byref(output), threads
    )
    return pixels


@functools.cache
def _check_library() -> None:
    """Check that the library decodes a small JPEG as libjpeg does, and resizes it correctly.

    Raises:
        NotBuilt: a result is wrong.
    """
    noise = np.random.default_rng(0).integers(0, 256, (37, 51, 3), np.uint8)
    data = simplejpeg.encode_jpeg(noise, quality=90, colorsubsampling="420")
    wanted = simplejpeg.decode_jpeg(data)
    height, width, channels = wanted.shape
    target = Target(height=height, width=width, channels=channels, exact=True, antialias=False)
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        job = np.zeros(1, JOB)
        for name, value in {
            "file": file.fileno(),
            "length": len(data),
            "crc32c": google_crc32c.value(data),
            "height": height,
            "width": width,
            "box_width": width,
            "box_height": height,
            "orientation": 1,
        }.items():
            job[name] = value
        pixels = _call(job, target, threads=1)
        if job["status"][0] != Status.DONE or not np.array_equal(pixels[0], wanted):
            raise NotBuilt("the compiled decoder does not decode a small JPEG as libjpeg does")
        # In a box that is moved by half a pixel, each pixel is the mean of two.
        job["x"], job["box_width"] = 0.5, width - 1
        between = _call(job, replace(target, width=width - 1), threads=1)
    means = np.rint((wanted[:, :-1].astype(np.float32) + wanted[:, 1:]) / 2)
    if job["status"][0] != Status.DONE or not np.array_equal(between[0], means):
        raise NotBuilt("the compiled decoder does not resize a small image correctly")


SOURCE = Path(__file__).with_name("decode.c")
"""Source of the decoder; to compile it, only libjpeg-turbo and its header are needed."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """Load the compiled decoder, and compile it first if necessary.

    Raises:
        NotBuilt: the compiler or libjpeg is missing, or the compiled file cannot be stored.
    """
    return load_compiled(SOURCE, "-ljpeg", "-lpthread", "-lm")
