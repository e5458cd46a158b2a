"""Make any `tf.data.Dataset` faster by `tf.data.Options`, without changes to its code.

TensorFlow rewrites the pipeline's graph when an iterator is made: a sequential `map` becomes
parallel, map and batch become one operation, a prefetch is added at the end. Most of this is TensorFlow
2.21's default, unless the pipeline says otherwise; here it is set explicitly, and what TensorFlow
never does by itself (a memory budget, own threads, slack) is added.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from stoker.core.errors import ConfigError

MEMINFO = Path("/proc/meminfo")
"""Shows how much memory is available without swapping."""

CGROUP = Path("/sys/fs/cgroup")
"""Shows a container's memory limit and use."""


_SHARED, _AS_MANY_AS_CORES = -1, 0
"""Special values of a dataset's `private_threadpool_size`."""


RAM_SHARE = 0.25
"""Most of the free memory that autotuned buffers may take."""


def tuned(
    dataset: tf.data.Dataset[Any],
    *,
    deterministic: bool = True,
    autotune: bool = True,
    threads: int | None = None,
    ahead: int | None = None,
    slack: bool = False,
) -> tf.data.Dataset[Any]:
    """Return a dataset that gives the same elements sooner.

    Args:
        dataset: Any pipeline. These arguments override its own options.
        deterministic: Whether elements keep their order. If not, a fast element may overtake a slow
            one in a map that was written as parallel; a map that is made parallel here keeps the order.
        autotune: Whether TensorFlow sets parallelism and buffers while the pipeline runs.
        threads: Size of a thread pool for this pipeline; None: the pipeline's own setting.
        ahead: Elements that a last prefetch holds; None: as many as TensorFlow finds.
        slack: Whether to hold the input back at the start of a step, where it would compete with the
            step's own launch on the CPU. Worth trying if the step runs on an accelerator.

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
        # TensorFlow reads 0 as "no budget".
        options.autotune.ram_budget = max(1, int(RAM_SHARE * free_memory_bytes()))
    if threads is not None:
        options.threading.private_threadpool_size = threads
    if slack:
        options.experimental_slack = True
    faster = dataset.with_options(options)
    if ahead is None and not slack:
        return faster
    # TensorFlow applies slack only to a prefetch that comes after the options that request it.
    return faster.prefetch(tf.data.AUTOTUNE if ahead is None else ahead)


def as_written(dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
    """Return the dataset without TensorFlow's autotuning.

    The autotuner's thread may miss the end of the iterator, and then delays it, and Python, until its next
    check: up to a minute (TensorFlow 2.21; at a quarter of all ends).
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def begun_early(dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
    """Return a dataset whose iterator prepares elements from its creation on.

    So the first batch is made while the step is traced. Not for a user-defined dataset: its Python
    code could draw random numbers while the model does.
    """
    options = tf.data.Options()
    options.experimental_warm_start = True  # type: ignore[attr-defined]  # not in its stubs
    return dataset.with_options(options)


def with_own_threads(dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
    """Return the dataset with a thread pool of its own.

    This is TensorFlow 2.21's default, unless the dataset sets an option. If one thread ran all operations,
    an operation that waits for an element would wait for itself.
    """
    if dataset.options().threading.private_threadpool_size != _SHARED:
        return dataset
    options = tf.data.Options()
    options.threading.private_threadpool_size = _AS_MANY_AS_CORES
    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # it would warn about this
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
        fix="Only Linux has it: feed on Linux.",
    )
