"""The decoder that is written in Python, and the choice of a decoder for this machine."""

from __future__ import annotations

import functools
import logging
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import simplejpeg
import tensorflow as tf
from numpy.typing import NDArray

from stoker.cluster.limits import usable_cores
from stoker.core.native_build import NotBuilt
from stoker.data.feed.config import Decoder
from stoker.data.feed.images.decode import (
    DecodeWhole,
    Engine,
    Status,
    Target,
    empty_batch,
    read_job,
)
from stoker.data.feed.images.decode_native import NativeEngine
from stoker.data.ingest.image_store import is_raw, raw_pixels, turned
from stoker.data.sources.images import headers
from stoker.data.sources.images.headers import TRANSPOSED


class OpenCvEngine:
    """Decoder in Python: TensorFlow's operations for exact batches, simplejpeg and OpenCV for random crops."""

    name = "opencv"

    def __init__(self, decode_whole: DecodeWhole, *, threads: int) -> None:
        """Create the thread pool."""
        cv2.setNumThreads(1)  # its threads would compete with ours
        self._decode_whole = decode_whole
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    def decode(self, jobs: NDArray[np.void], target: Target) -> NDArray[np.uint8]:
        """Decode a batch; see `Engine`."""
        pixels = empty_batch(len(jobs), target)

        def decode_job(place: int) -> Status:
            job = jobs[place]
            data = read_job(job)
            if isinstance(data, Status):
                return data
            try:
                image, scale = self._decoded(data, job, target)
            except (ValueError, cv2.error):
                return Status.BROKEN
            if image is None:
                return Status.OTHER_SIZE
            made = _crop_and_resize(image, job, target, scale)
            pixels[place] = made[:, ::-1] if job["flip"] else made
            return Status.DONE

        jobs["status"] = list(self._pool.map(decode_job, range(len(jobs))))
        return pixels

    def _decoded(
        self, data: bytes, job: np.void, target: Target
    ) -> tuple[NDArray[np.uint8] | None, float]:
        """Return upright pixels and their scale; None for pixels of a different size than ingest found."""
        scale = 1.0
        if is_raw(data):
            image = raw_pixels(data)
        elif data.startswith(headers.JPEG) and not target.exact and _is_rgb_or_gray(data):
            image, scale = _decode_scaled(data, job, target)
        else:
            image = self._decode_whole(data, target.channels)
        wanted = np.ceil(np.array([job["height"], job["width"]]) * scale)
        if tuple(wanted) != image.shape[:2] or image.shape[2] != target.channels:
            return None, scale
        return image, scale


def _is_rgb_or_gray(data: bytes) -> bool:
    return bool(simplejpeg.decode_jpeg_header(data)[2] != "CMYK")


def _decode_scaled(data: bytes, job: np.void, target: Target) -> tuple[NDArray[np.uint8], float]:
    """Decode a JPEG at the smallest scale at which the box is still as large as the result."""
    shrink = min(job["box_height"] / target.height, job["box_width"] / target.width)
    scale = next((s for s in (0.125, 0.25, 0.5) if shrink * s >= 1), 1.0)
    height, width = (int(np.ceil(job[name] * scale)) for name in ("height", "width"))
    if job["orientation"] >= TRANSPOSED:
        height, width = width, height
    lying = simplejpeg.decode_jpeg(
        data,
        colorspace="RGB" if target.channels == 3 else "GRAY",
        min_height=height if scale < 1 else 0,
        min_width=width if scale < 1 else 0,
        strict=False,
    )
    return turned(lying, int(job["orientation"])), scale


def _crop_and_resize(
    image: NDArray[np.uint8], job: np.void, target: Target, scale: float
) -> NDArray[np.uint8]:
    """Return the job's box of the image, resized to the target's size."""
    left, top = (int(job[name] * scale) for name in ("x", "y"))
    right = int(np.ceil((job["x"] + job["box_width"]) * scale))
    bottom = int(np.ceil((job["y"] + job["box_height"]) * scale))
    box = image[top:bottom, left:right]
    size = (target.height, target.width)
    if target.exact:
        resized = tf.image.resize(box, size, antialias=target.antialias)
        return np.asarray(tf.cast(tf.clip_by_value(tf.round(resized), 0, 255), tf.uint8))
    # If it shrinks by less than 2, the scaled decode has smoothed enough; INTER_AREA would cost 0.9 ms.
    shrink = min(box.shape[0] / target.height, box.shape[1] / target.width)
    how = cv2.INTER_AREA if shrink >= 2 else cv2.INTER_LINEAR
    made = cv2.resize(np.ascontiguousarray(box), size[::-1], interpolation=how)
    return np.asarray(made, np.uint8).reshape(*size, target.channels)


_LOG = logging.getLogger(__name__)


def choose_engine(
    decode_whole: DecodeWhole, *, prefer: Decoder = "auto", threads: int | None = None
) -> Engine:
    """Return the fastest engine that works on this machine; warn once if it is not the native one.

    Args:
        decode_whole: The exported graph's decoder.
        prefer: The engine; `auto`: native if it can be built and passes its check, else opencv.
        threads: Number of decoding threads; None: the number of cores.

    Raises:
        NotBuilt: `prefer` is `native`, and the native engine cannot be built or fails its check.
    """
    threads = threads or usable_cores()
    if prefer == "opencv":
        return OpenCvEngine(decode_whole, threads=threads)
    try:
        return NativeEngine(decode_whole, threads=threads)
    except NotBuilt as reason:
        if prefer == "native":
            raise
        _warn_once(str(reason))
        return OpenCvEngine(decode_whole, threads=threads)


@functools.cache
def _warn_once(reason: str) -> None:
    _LOG.warning(
        "images are decoded by OpenCV, which takes more CPU time than Stoker's decoder: %s", reason
    )
