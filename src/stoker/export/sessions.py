"""The TensorFlow sessions that exported models run in: their threads, and what they take of a GPU."""

from __future__ import annotations

import functools
import logging

import tensorflow as tf

_log = logging.getLogger(__name__)

INLINE = -1
"""The number of threads by which a session runs a call in the thread of its caller."""


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
    """How every session of a process is configured.

    Memory of a GPU grows on demand. A fraction is a limit that TensorFlow's allocator holds; it is
    taken of the memory of whichever device the session sees, so that it is right for a MIG instance.

    Without a GPU a call runs in the thread of its caller: no hand-over, and a load at low priority
    stays there. With one, kernels end in threads of the driver's, and what follows them on the CPU
    would run there and hold up other calls; so TensorFlow's own threads are used, as by default.
    Which of the two is quicker on a GPU has not been measured.

    Args:
        given: What the user has set; what follows comes on top of it.
        gpu_memory_fraction: Largest share of a GPU's memory, 0..1; 0 sets no limit.
        intra_op_threads: Threads that compute one operation; 0: TensorFlow's choice.
        inter_op_threads: Operations that run at once; 0: as said above.
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
        config.use_per_session_threads = True  # else the first session of the process decides
    elif not config.inter_op_parallelism_threads and not has_gpu():
        config.inter_op_parallelism_threads = INLINE
    return config


def inter_op_pool(session: tf.compat.v1.Session) -> int:
    """The pool that calls of a session name: `INLINE` where the session runs them in the caller's thread."""
    inline = session._config.inter_op_parallelism_threads == INLINE  # noqa: SLF001 - public nowhere
    return INLINE if inline else 0


def open_devices(config: tf.compat.v1.ConfigProto) -> None:
    """Make TensorFlow open the GPU with this configuration, before anything else does.

    One allocator serves all sessions of a process, and eager code too: the first to open the device
    sets its limit.
    """
    if not has_gpu():
        return
    tf.compat.v1.Session(graph=tf.Graph(), config=config).close()
    fraction = config.gpu_options.per_process_gpu_memory_fraction
    limit = f"at most {fraction:.1%} of its memory" if fraction else "memory as it is needed"
    _log.info("models run on the first GPU that is visible here, with %s", limit)
