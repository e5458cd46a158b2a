"""`decode.c` -> a library in this process."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

from stoker.core.native_build import load_compiled

SOURCE = Path(__file__).with_name("decode.c")
"""Our own code, with libjpeg-turbo's header as all that it needs."""


@functools.cache
def load_library() -> ctypes.CDLL:
    """The compiled decoder.

    Raises:
        NotBuilt: there is no compiler, no libjpeg, or nowhere to keep the result.
    """
    return load_compiled(SOURCE, "-ljpeg", "-lpthread", "-lm")
