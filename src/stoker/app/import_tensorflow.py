"""Imports TensorFlow without the messages that its libraries print at startup."""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile

from stoker.cluster.compile_flags import prepare


def import_tensorflow(*, compiles: bool = False) -> None:
    """Import TensorFlow, and hide what its libraries print during the import, unless it fails.

    The libraries print directly to the file descriptor, before they read the log level from the environment.
    With `TF_CPP_MIN_LOG_LEVEL` below 2, their output is shown.

    Args:
        compiles: Whether to keep programs that XLA compiles in a cache on disk.
    """
    if compiles:
        prepare(os.environ)
    # Otherwise TensorFlow takes all memory of a GPU, and none is left for other processes. The variable must be set
    # before TensorFlow initializes the devices, which the stage `transform` does.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    # Without this variable, TensorFlow transposes input and output of a 16-bit BatchNormalization to NCHW
    # and back. Source: tensorflow/core/kernels/fused_batch_norm_op.cc, BatchnormSpatialPersistentEnabled.
    os.environ.setdefault("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", "1")
    level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    closed = sys.stderr is None
    if "tensorflow" in sys.modules or level in ("0", "1") or closed:
        return
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    with tempfile.TemporaryFile() as output:
        stderr = os.dup(2)
        sys.stderr.flush()
        os.dup2(output.fileno(), 2)
        collects = gc.isenabled()
        # Imported objects are never freed. To search them in garbage collections, during the import and later (Keras
        # triggers some), took 3.0 of the 10.7 CPU seconds of a small training.
        gc.disable()
        try:
            import tensorflow as tf  # noqa: F401 - imported for its effect

            gc.freeze()
        except BaseException:
            output.seek(0)
            os.write(stderr, output.read())
            raise
        finally:
            if collects:
                gc.enable()
            os.dup2(stderr, 2)
            os.close(stderr)
