"""What the calls of a run read, one after the other."""

from __future__ import annotations

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
    """Of groups: the tensors of the last one taken, and how many of its batches are used, int64."""


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
