"""Which engine decodes on this machine."""

from __future__ import annotations

import functools
import logging
import os

from stoker.core.native_build import NotBuilt
from stoker.data.feed.config import Decoder
from stoker.data.feed.images.decode import DecodeWhole, Engine
from stoker.data.feed.images.decode_native import NativeEngine
from stoker.data.feed.images.decode_opencv import OpenCvEngine

_LOG = logging.getLogger(__name__)


def choose_engine(
    decode_whole: DecodeWhole, *, prefer: Decoder = "auto", threads: int | None = None
) -> Engine:
    """The quickest engine that works on this machine; what is missing is said once.

    Args:
        decode_whole: The exported graph's decoder.
        prefer: auto: native where it can be built and agrees with the reference, else opencv.
        threads: That decode; None: as many as cores.

    Raises:
        NotBuilt: the native one is asked for by name, and there is none.
    """
    threads = threads or usable_cores()
    if prefer == "opencv":
        return OpenCvEngine(decode_whole, threads=threads)
    try:
        return NativeEngine(decode_whole, threads=threads)
    except NotBuilt as reason:
        if prefer == "native":
            raise
        _say_once(str(reason))
        return OpenCvEngine(decode_whole, threads=threads)


@functools.cache
def _say_once(reason: str) -> None:
    _LOG.warning("images are decoded by OpenCV, which takes more CPU than Stoker's own: %s", reason)


def usable_cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))
