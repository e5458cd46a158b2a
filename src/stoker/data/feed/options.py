"""Make any `tf.data.Dataset` faster with `tf.data.Options`, without changes to its code.

TensorFlow rewrites the pipeline's graph when an iterator is created: a sequential `map` becomes parallel, map
and batch are merged into one operation, and a prefetch is added at the end. Most of this is the default of
TensorFlow 2.21, unless the pipeline's own options turn it off; here it is set explicitly. A memory budget, a
thread pool and slack, which TensorFlow never sets by default, are added.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from stoker.core.errors import ConfigError

MEMINFO = Path("/proc/meminfo")
"""File with the amount of memory that is available without swapping."""

CGROUP = Path("/sys/fs/cgroup")
"""Folder with a container's memory limit and use."""


_SHARED, _AS_MANY_AS_CORES = -1, 0
"""Special values of a dataset's `private_threadpool_size`."""


RAM_SHARE = 0.25
"""Maximum share of the free memory that autotuned buffers may use."""


def tuned(
    dataset: tf.data.Dataset[Any],
    *,
    deterministic: bool = True,
    autotune: bool = True,
    threads: int | None = None,
    ahead: int | None = None,
    slack: bool = False,
) -> tf.data.Dataset[Any]:
    """Return a dataset that makes the same elements faster.

    Args:
        dataset: Any pipeline. The other arguments override its own options.
        deterministic: Whether elements keep their order. If not, a `map` that was written as parallel may
            return a fast element before a slow one; a `map` that becomes parallel here keeps the order.
        autotune: Whether TensorFlow changes parallelism and buffers while the pipeline runs.
        threads: Size of a thread pool for this pipeline; None: the pipeline's own setting.
        ahead: Number of elements that are prefetched at the end; None: TensorFlow chooses it.
        slack: Whether to delay the input at the start of a step, when it would compete for the CPU with
            the launch of the step. Worth trying if the step runs on an accelerator.

    Source: `tf.data.Options`, TensorFlow 2.21.
    """
    options = tf.data.Options()
    options.deterministic = deterministic
    rewrites = options.experimental_optimization
    rewrites.map_parallelization = True
    # `filter_parallelization` is not set: TensorFlow 2.21 cannot serialize the result.
    rewrites.parallel_batch = True
    rewrites.map_and_batch_fusion = True
    rewrites.inject_prefetch = True
    options.autotune.enabled = autotune
    if autotune:
        # For TensorFlow, 0 means "no budget".
        options.autotune.ram_budget = max(1, int(RAM_SHARE * free_memory_bytes()))
    if threads is not None:
        options.threading.private_threadpool_size = threads
    if slack:
        options.experimental_slack = True
    faster = dataset.with_options(options)
    if ahead is None and not slack:
        return faster
    # TensorFlow applies slack only to a prefetch that comes after the option.
    return faster.prefetch(tf.data.AUTOTUNE if ahead is None else ahead)


def as_written(dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
    """Return the dataset without TensorFlow's autotuning.

    The autotuner's thread may miss that an iterator was deleted. Then the deletion, and Python with it, waits
    for the thread's next check, for up to a minute (TensorFlow 2.21; a quarter of all deletions).
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def begun_early(dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
    """Return a dataset whose iterator starts to prepare elements as soon as it is created.

    So the first batch is made while the step is traced. Do not use it for a user-defined dataset: its Python
    code could draw random numbers at the same time as the model.
    """
    options = tf.data.Options()
    options.experimental_warm_start = True  # type: ignore[attr-defined]  # not in its stubs
    return dataset.with_options(options)


def with_own_threads(dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
    """Return the dataset with a private thread pool.

    This is the default of TensorFlow 2.21, unless the dataset sets an option. Without it, all operations could
    run in one thread, and an operation that waits for an element would wait forever.
    """
    if dataset.options().threading.private_threadpool_size != _SHARED:
        return dataset
    options = tf.data.Options()
    options.threading.private_threadpool_size = _AS_MANY_AS_CORES
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # TensorFlow would warn about this option
    try:
        return dataset.with_options(options)
    finally:
        logging.set_verbosity(verbosity)


def free_memory_bytes() -> int:
    """Return the free memory of the machine, or of its container if that is less.

    Raises:
        ConfigError: the system is not Linux.
    """
    free = _available_bytes()
    with contextlib.suppress(OSError, ValueError):
        limit = int((CGROUP / "memory.max").read_text())  # "max" without a limit
        free = min(free, limit - int((CGROUP / "memory.current").read_text()))
    return max(free, 0)


def _available_bytes() -> int:
    for line in MEMINFO.read_text().splitlines() if MEMINFO.is_file() else ():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) << 10
    raise ConfigError(
        f"{MEMINFO} must say how much memory is available",
        fix="Only Linux has this file. Run Stoker on Linux.",
    )
