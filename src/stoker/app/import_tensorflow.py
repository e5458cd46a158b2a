"""TensorFlow without its start-up chatter."""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile

from stoker.cluster.compile_flags import prepare


def import_tensorflow(*, compiles: bool = False) -> None:
    """Import TensorFlow; what its libraries print meanwhile is shown only where it fails.

    They print before the log level that the environment sets is read, straight to the file
    descriptor. `TF_CPP_MIN_LOG_LEVEL` below 2 is taken as the wish to see it all.

    Args:
        compiles: Keep programs that XLA compiles in the cache on disk.
    """
    if compiles:
        prepare(os.environ)
    # A process that takes all of a GPU's memory starves its neighbours. It must be said before
    # TensorFlow looks at the devices, which the transform's stage makes it do.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    # Without it, TensorFlow transposes input and output of a 16-bit BatchNormalization to NCHW and
    # back. Source: tensorflow/core/kernels/fused_batch_norm_op.cc, BatchnormSpatialPersistentEnabled.
    os.environ.setdefault("TF_USE_CUDNN_BATCHNORM_SPATIAL_PERSISTENT", "1")
    level = os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    closed = sys.stderr is None
    if "tensorflow" in sys.modules or level in ("0", "1") or closed:
        return
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    with tempfile.TemporaryFile() as said:
        stderr = os.dup(2)
        sys.stderr.flush()
        os.dup2(said.fileno(), 2)
        collects = gc.isenabled()
        # What is imported stays. To look for garbage in it, meanwhile and at every later collection
        # (Keras asks for some), took 3.0 of the 10.7 CPU seconds of a small training.
        gc.disable()
        try:
            import tensorflow as tf  # noqa: F401 - the import is what is wanted

            gc.freeze()
        except BaseException:
            said.seek(0)
            os.write(stderr, said.read())
            raise
        finally:
            if collects:
                gc.enable()
            os.dup2(stderr, 2)
            os.close(stderr)
