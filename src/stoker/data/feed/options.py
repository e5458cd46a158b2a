"""Any `tf.data.Dataset` made faster by `tf.data.Options`, without touching how it was written.

TensorFlow rewrites the pipeline's graph when an iterator is made: a sequential `map` becomes
parallel, map and batch one operation, a prefetch stands at the end. Most of this is TensorFlow
2.21's default, unless the pipeline says otherwise; here it is asked for by name, and what TensorFlow
never does by itself (a memory budget, threads of its own, slack) is added.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf
from absl import logging

from stoker.core.errors import ConfigError

MEMINFO = Path("/proc/meminfo")
"""Where the kernel says how much memory may be taken without swapping."""

CGROUP = Path("/sys/fs/cgroup")
"""Where a container's own limit and use stand."""


_SHARED, _AS_MANY_AS_CORES = -1, 0
"""How many threads a dataset has for itself, where that is no number of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DatasetOptions:
    """What TensorFlow may do to a pipeline to make it faster.

    Source: `tf.data.Options`, TensorFlow 2.21.
    """

    deterministic: bool = True
    """Elements keep the order that the pipeline gives them. False lets a slow one be overtaken, in
    a map that was written as parallel; one that is made parallel here keeps the order anyhow."""

    parallelise: bool = True
    """A sequential map of pure operations runs on many elements at once, and the elements of a batch
    are copied side by side."""

    fuse: bool = True
    """A map that a batch follows becomes one operation, which writes straight into the batch."""

    prefetch: bool = True
    """A pipeline that does not end in a prefetch gets one."""

    autotune: bool = True
    """TensorFlow sets parallelism and buffers while it runs."""

    ram_share: float = 0.25
    """Share of the memory that is free now which autotuned buffers may take; 0 to 1."""

    threads: int | None = None
    """Threads of the pipeline's own; None: as many as it says itself, or as there are cores."""

    ahead: int | None = None
    """Elements that the last prefetch holds; None: as many as TensorFlow finds."""

    slack: bool = False
    """Hold the input back at the start of a step, where it would compete with the step's own
    launch on the CPU. Worth trying where the step runs on an accelerator."""

    def __post_init__(self) -> None:
        if not 0 < self.ram_share <= 1:
            raise ConfigError(
                "ram_share must be a share above 0 and at most 1",
                got=self.ram_share,
                fix="0.25 is a good start.",
            )
        if self.threads is not None and self.threads < 1:
            raise ConfigError(
                "threads must be at least 1",
                got=self.threads,
                fix="Leave it out to share the process's threads.",
            )


def tuned(dataset: tf.data.Dataset[Any], options: DatasetOptions) -> tf.data.Dataset[Any]:
    """The same elements, in the same order where `options.deterministic`, sooner.

    Args:
        dataset: Any pipeline; what it says itself of these options is overruled.
        options: What may be done to it.
    """
    faster = dataset.with_options(_to_tensorflow(options))
    if options.ahead is None and not options.slack:
        return faster
    # TensorFlow gives slack only to a prefetch that stands after the options that ask for it.
    return faster.prefetch(tf.data.AUTOTUNE if options.ahead is None else options.ahead)


def as_written(dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
    """The same without TensorFlow's autotuning: with the parallelism and buffers that are written.

    Its thread may miss that the iterator ends, and then holds that end, and Python with it, until it
    would have looked again: up to a minute (TensorFlow 2.21; it did so at a quarter of all ends).
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    return dataset.with_options(options)


def begun_early(dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
    """A dataset whose iterator prepares elements from its creation on, not from its first `next`.

    So the first batch is made while the step is traced. Not for a user-defined dataset: its Python
    code could draw random numbers while the model does.
    """
    options = tf.data.Options()
    options.experimental_warm_start = True  # type: ignore[attr-defined]  # not in its stubs
    return dataset.with_options(options)


def with_own_threads(dataset: tf.data.Dataset[Any]) -> tf.data.Dataset[Any]:
    """The same with its functions run by threads that run nothing else.

    TensorFlow 2.21 does so, unless a dataset says otherwise. Where one thread runs all operations, one
    that waits for an element would wait for itself.
    """
    if dataset.options().threading.private_threadpool_size != _SHARED:
        return dataset
    options = tf.data.Options()
    options.threading.private_threadpool_size = _AS_MANY_AS_CORES
    said = logging.get_verbosity()
    logging.set_verbosity(logging.ERROR)  # it would warn of what is meant
    try:
        return dataset.with_options(options)
    finally:
        logging.set_verbosity(said)


def free_memory_bytes() -> int:
    """Memory that this process may still take: the machine's, or its container's where that is less.

    Raises:
        ConfigError: the kernel does not say (this is no Linux).
    """
    free = _available_bytes()
    with contextlib.suppress(OSError, ValueError):
        limit = int((CGROUP / "memory.max").read_text())  # "max" where there is no limit
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


def _to_tensorflow(options: DatasetOptions) -> tf.data.Options:
    made = tf.data.Options()
    made.deterministic = options.deterministic
    rewrites = made.experimental_optimization
    rewrites.map_parallelization = options.parallelise
    # `filter_parallelization` is left alone: TensorFlow 2.21 cannot serialise what it makes.
    rewrites.parallel_batch = options.parallelise
    rewrites.map_and_batch_fusion = options.fuse
    rewrites.inject_prefetch = options.prefetch
    made.autotune.enabled = options.autotune
    if options.autotune:
        # TensorFlow takes 0 for "no budget".
        made.autotune.ram_budget = max(1, int(options.ram_share * free_memory_bytes()))
    if options.threads is not None:
        made.threading.private_threadpool_size = options.threads
    if options.slack:
        made.experimental_slack = True
    return made
