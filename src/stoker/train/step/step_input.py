"""What the calls of a run read, one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import config

GROUPS_AHEAD = 2
"""Groups that are made ahead: to take one costs the step nothing then."""


@dataclass(kw_only=True, slots=True)
class StepInput:
    """An iterator, and what a call has left for the next one."""

    iterator: Any
    group: int = 1
    """Steps whose batches are one element; where an element has the rows of a call, 1."""

    ahead: bool = False
    """Whether a call begins with a batch that is taken already, and takes one for the next call; not
    where each step takes its own."""

    endless: bool = False
    """Whether a pass begins at once behind every other one."""

    left: Any = ()
    """The tensors of the batch that is taken, none where nothing is yet; of groups, those of the last one
    and how many of its batches are used, int64."""

    @property
    def left_spec(self) -> Any:
        """What `left` is in every call."""
        if self.ahead:
            return tuple(tf.nest.flatten(self.iterator.element_spec, expand_composites=True))
        return tuple(tf.TensorSpec(each.shape, each.dtype) for each in self.left)

    def take_first(self) -> float:
        """Take the first batch, where none is taken yet; the seconds that it took, else 0."""
        if self.left:
            return 0.0
        begun_s = time.monotonic()
        self.left = flat(self.iterator.get_next())
        return time.monotonic() - begun_s


def flat(element: Any) -> tuple[tf.Tensor, ...]:
    """The tensors of an element."""
    return tuple(tf.nest.flatten(element, expand_composites=True))


def unflat(tensors: Sequence[tf.Tensor], spec: Any) -> Any:
    """The element that has these tensors, after its specification."""
    return tf.nest.pack_sequence_as(spec, list(tensors), expand_composites=True)


def takes_batches_inline(spec: Any) -> bool:
    """Whether each step takes its own batch: one operation runs at a time, and it is plain tensors.

    Not where operations must be deterministic: TensorFlow then takes the prefetch out of a pipeline
    that calls Python or draws random numbers, and all its work would be waited for.
    """
    plain = all(isinstance(each, tf.TensorSpec) for each in tf.nest.flatten(spec))
    must_be_exact = bool(config.is_op_determinism_enabled())  # type: ignore[no-untyped-call]  # TensorFlow has no types here
    one_at_a_time = tf.config.threading.get_inter_op_parallelism_threads() == 1
    return plain and one_at_a_time and not must_be_exact


def next_in_place(iterator: Any) -> Any:
    """`next(iterator)` in a graph, by the thread that comes to it; else TensorFlow hands it to another.

    Args:
        iterator: Of plain tensors.
    """
    specs = tf.nest.flatten(iterator.element_spec)
    (resource,) = tf.nest.flatten(iterator, expand_composites=True)
    tensors = tf.raw_ops.IteratorGetNextSync(
        iterator=resource,
        output_types=[spec.dtype for spec in specs],
        output_shapes=[spec.shape for spec in specs],
    )
    return tf.nest.pack_sequence_as(iterator.element_spec, tensors)


def placeholder_input(element: Any) -> Any:
    """An iterator that has this element at once, again and again."""
    # TensorFlow's autotuner, which has nothing to tune here, holds up the end of an iterator where a clock
    # was set back.
    options = tf.data.Options()
    options.autotune.enabled = False
    return iter(tf.data.Dataset.from_tensors(element).repeat().with_options(options))


def group_batches(batches: tf.data.Dataset[Any], size: int) -> StepInput:
    """Batches of fixed shapes as elements of [size, *batch]: nothing of the first one is there yet.

    To take an element in the graph costs about 30 us of a core, however small it is.

    Args:
        batches: Without an end.
        size: How many are one element.
    """
    groups = batches.batch(size, drop_remainder=True).prefetch(GROUPS_AHEAD)
    nothing = [tf.zeros(spec.shape, spec.dtype) for spec in tf.nest.flatten(groups.element_spec)]
    return StepInput(
        iterator=iter(groups), group=size, left=(*nothing, tf.constant(size, tf.int64))
    )
