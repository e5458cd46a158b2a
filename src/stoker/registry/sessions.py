"""Configures the TensorFlow sessions that exported models run in: threads, and GPU memory."""

from __future__ import annotations

import functools
import logging

import tensorflow as tf

_log = logging.getLogger(__name__)

INLINE = -1
"""Thread count that makes a session run a call in its caller's thread."""


@functools.cache
def has_gpu() -> bool:
    """Whether TensorFlow sees a GPU in this process."""
    return bool(tf.config.list_physical_devices("GPU"))


def session_config(
    given: tf.compat.v1.ConfigProto | None = None,
    *,
    gpu_memory_fraction: float = 0.0,
    intra_op_threads: int = 0,
    inter_op_threads: int = 0,
) -> tf.compat.v1.ConfigProto:
    """The configuration of every session in a process.

    GPU memory grows on demand. A fraction is a limit enforced by TensorFlow's allocator. It refers
    to the memory of the device that the session sees, so it is right for a MIG instance too.

    Without a GPU, a call runs in its caller's thread: there is no hand-over, and a load at low
    priority stays there. With a GPU, kernels end in threads of the driver; CPU operations after
    them would run there and delay other calls. So TensorFlow's own threads are used, as by default.
    Which of the two is faster on a GPU has not been measured.

    Args:
        given: The user's settings; the other arguments are applied on top.
        gpu_memory_fraction: Largest share of a GPU's memory, 0..1; 0 sets no limit.
        intra_op_threads: Threads that compute one operation; 0: TensorFlow's choice.
        inter_op_threads: Operations that run at once; 0: as described above.
    """
    config = tf.compat.v1.ConfigProto()
    if given is not None:
        config.CopyFrom(given)
    config.gpu_options.allow_growth = True
    if gpu_memory_fraction:
        config.gpu_options.per_process_gpu_memory_fraction = gpu_memory_fraction
    # A model may name a device that this worker does not have.
    config.allow_soft_placement = True
    if intra_op_threads:
        config.intra_op_parallelism_threads = intra_op_threads
    if inter_op_threads:
        config.inter_op_parallelism_threads = inter_op_threads
        config.use_per_session_threads = True  # otherwise the process's first session decides
    elif not config.inter_op_parallelism_threads and not has_gpu():
        config.inter_op_parallelism_threads = INLINE
    return config


def inter_op_pool(session: tf.compat.v1.Session) -> int:
    """The pool for calls of a session: `INLINE` if it runs them in the caller's thread."""
    inline = session._config.inter_op_parallelism_threads == INLINE  # noqa: SLF001 - public nowhere
    return INLINE if inline else 0


def open_devices(config: tf.compat.v1.ConfigProto) -> None:
    """Open the GPU with this configuration, before anything else does.

    One allocator serves all sessions of a process, and eager code too: whatever opens the device
    first sets its limit.
    """
    if not has_gpu():
        return
    tf.compat.v1.Session(graph=tf.Graph(), config=config).close()
    fraction = config.gpu_options.per_process_gpu_memory_fraction
    limit = f"at most {fraction:.1%} of its memory" if fraction else "memory growing on demand"
    _log.info("models run on the first GPU that is visible here, with %s", limit)
