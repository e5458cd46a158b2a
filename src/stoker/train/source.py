"""What the calls of a run read, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

GROUPS_AHEAD = 2
"""Groups that are made ahead: to take one costs the step nothing then."""


@dataclass(kw_only=True, slots=True)
class Source:
    """An iterator, and what a call has left of its last element for the next one."""

    iterator: Any
    group: int = 1
    """Steps whose batches are one element; where an element has the rows of a call, 1."""

    left: Any = ()
    """The tensors of the batch that was taken ahead; of a group, and how many of its batches are used, int64."""

    @property
    def left_spec(self) -> Any:
        """What `left` is in every call."""
        if not self.left:
            return ()
        specs = tf.nest.flatten(self.iterator.element_spec, expand_composites=True)
        return (*specs, *(tf.TensorSpec([], tf.int64) for _ in self.left[len(specs) :]))


def flat(element: Any) -> tuple[tf.Tensor, ...]:
    """The tensors of an element."""
    return tuple(tf.nest.flatten(element, expand_composites=True))


def unflat(tensors: Sequence[tf.Tensor], spec: Any) -> Any:
    """The element that has these tensors, after its specification."""
    return tf.nest.pack_sequence_as(spec, list(tensors), expand_composites=True)


def one_ahead(batches: tf.data.Dataset[Any], last: Any = None) -> Source:
    """Batches of which one is taken already.

    Args:
        batches: At least one.
        last: An element that stands behind the last one, where there is an end: it is taken, and of
            no use.
    """
    if batches.cardinality() != tf.data.INFINITE_CARDINALITY:
        batches = batches.concatenate(tf.data.Dataset.from_tensors(last))
    iterator = iter(batches)
    return Source(iterator=iterator, left=flat(next(iterator)))


def grouped(batches: tf.data.Dataset[Any], size: int) -> Source:
    """Batches of fixed shapes as elements of [size, *batch]: nothing of the first one is there yet.

    To take an element in the graph costs about 30 us of a core, however small it is.

    Args:
        batches: Without an end.
        size: How many are one element.
    """
    groups = batches.batch(size, drop_remainder=True).prefetch(GROUPS_AHEAD)
    nothing = [tf.zeros(spec.shape, spec.dtype) for spec in tf.nest.flatten(groups.element_spec)]
    return Source(iterator=iter(groups), group=size, left=(*nothing, tf.constant(size, tf.int64)))
