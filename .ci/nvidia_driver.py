"""Exit with 0 if an NVIDIA driver shows a GPU: `make setup` then installs CUDA. Else exit with 1.

Only the driver's own libraries count. The CUDA toolkit has neither of them, and `/proc/driver/nvidia` is
the host's in a container that was started without a GPU. Runs before anything is installed.
"""

from __future__ import annotations

import ctypes
import os
import sys

LIBRARIES = (
    ("libnvidia-ml.so.1", "nvmlInitWithFlags", "nvmlDeviceGetCount_v2"),
    ("libcuda.so.1", "cuInit", "cuDeviceGetCount"),  # a container may have only this one
)
"""Library, the function that initializes it, and the function that counts its GPUs."""


def count_gpus(library: str, start: str, count: str) -> int:
    """Number of GPUs that one library of the driver shows; 0 without the library or the driver."""
    try:
        driver = ctypes.CDLL(library)
        found = ctypes.c_uint()
        if getattr(driver, start)(0) or getattr(driver, count)(ctypes.byref(found)):
            return 0
    except (OSError, AttributeError):
        return 0
    return found.value


if __name__ == "__main__":
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # a hidden GPU is a GPU
    sys.exit(not any(count_gpus(*names) for names in LIBRARIES))
