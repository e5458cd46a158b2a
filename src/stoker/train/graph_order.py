"""In which order TensorFlow runs what a step is made of."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

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


def filters_first(made: Sequence[tf.Operation], gradients: Sequence[Any]) -> None:
    """Compute a 2-D convolution's gradient of its filters before that of its input.

    Where one operation runs at a time, TensorFlow draws by chance, anew for each trace, whether it
    does so or leaves all filters to the end, when what they need has left the cache. For where
    several run at once it would only be a wait.

    Args:
        made: What a tape has just added to the graph.
        gradients: What it gave; filters that are frozen have none.
    """
    new, wanted = set(made), {id(gradient) for gradient in gradients}
    for operation in made:
        filters = _FILTERS_OF.get(operation.type)
        if filters is None or _waits_for(operation, new):
            continue
        for other in operation.inputs[2].consumers():
            (found,) = other.outputs[:1] or (None,)
            is_used = id(found) in wanted or bool(found is not None and found.consumers())
            # What was there before depends on nothing of this: no circle can come about.
            if other.type == filters and other in new and is_used and not _waits_for(other, new):
                operation._add_control_input(other)  # noqa: SLF001 - there is no public way


def _waits_for(operation: tf.Operation, new: Collection[tf.Operation]) -> bool:
    """Whether more than the gradient that comes in is new, as in a gradient of a gradient."""
    told = [each.op for each in operation.inputs[:2]]
    # By the sizes of a tensor it waits for that tensor.
    behind = [each.op for one in told if one.type in _SIZES for each in one.inputs]
    waits_for = [one for one in told if one.type not in _SIZES] + behind
    return any(one in new for one in [*waits_for, *operation.control_inputs])


_SIZES = {"Const", "Shape", "ShapeN"}
"""What a gradient is told its size by."""
