"""In which order TensorFlow runs what a step is made of."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import tensorflow as tf

_FILTERS_OF = {"Conv2DBackpropInput": "Conv2DBackpropFilter"}
"""What computes a convolution's gradient of its input -> of its filters. Both read, as their third
input, the gradient of what the convolution gave."""


def operations() -> list[tf.Operation]:
    """Those of the graph that is being traced, in the order in which they were made."""
    return list(tf.compat.v1.get_default_graph().get_operations())


def one_at_a_time() -> bool:
    """Whether this process runs one operation after the other (`train.inter_op_threads: 1`)."""
    return int(tf.config.threading.get_inter_op_parallelism_threads()) == 1


def filters_first(made: Sequence[tf.Operation]) -> None:
    """Compute a convolution's gradient of its filters before that of its input.

    Where one operation runs at a time, TensorFlow draws by chance, anew for each trace, whether it
    does so or leaves all filters to the end, when what they need has left the cache. For where
    several run at once it would only be a wait.

    Args:
        made: What a tape has just added to the graph.
    """
    new = set(made)
    for operation in made:
        filters = _FILTERS_OF.get(operation.type)
        if filters is None or _inputs_are_made(operation, new):
            continue
        for other in operation.inputs[2].consumers():
            # What was there before depends on nothing of this: no circle can come about.
            if other.type == filters and other in new and not _inputs_are_made(other, new):
                operation._add_control_input(other)  # noqa: SLF001 - there is no public way


def _inputs_are_made(operation: tf.Operation, new: Collection[tf.Operation]) -> bool:
    """Whether more than the gradient that comes in is new: so it is in a gradient of a gradient."""
    return any(each.op in new for each in operation.inputs[:2] if each.op.type not in _SIZES)


_SIZES = {"Const", "Shape", "ShapeN"}
"""What a gradient is told its size by."""
