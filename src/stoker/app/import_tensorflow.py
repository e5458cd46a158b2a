"""Imports TensorFlow without the messages that its libraries print at startup."""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile

from stoker.cluster.compile_flags import prepare


def import_tensorflow(*, compiles: bool = False) -> None:
    """Import TensorFlow; show what its libraries print meanwhile only if the import fails.

    They print directly to the file descriptor, before they read the log level from the environment.
    With `TF_CPP_MIN_LOG_LEVEL` below 2, everything is shown.

    Args:
        compiles: Keep programs that XLA compiles in the cache on disk.
    """
    if compiles:
        prepare(os.environ)
    # Otherwise TensorFlow takes all memory of a GPU, and other processes have none. It must be set before
    # TensorFlow initializes the devices, which the stage `transform` does.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    # Without it, TensorFlow transposes input and output of a 16-bit BatchNormalization to NCHW and
    # back. Source: tensorflow/core/kernels/fused_batch_norm_op.cc, BatchnormSpatialPersistentEnabled.
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
        # Imported objects stay. Collecting garbage among them, during the import and in every later
        # collection (Keras triggers some), took 3.0 of the 10.7 CPU seconds of a small training.
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
