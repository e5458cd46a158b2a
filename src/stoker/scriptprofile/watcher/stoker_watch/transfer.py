"""What it takes to copy a batch to a GPU, alone: not run on a GPU yet."""

from __future__ import annotations

import sys
from typing import Any

from .facts import FACTS
from .loops import clock

COPIES = 10
"""Of the batch, one after the other: waiting for their end is then little beside them."""


def transfer_s(batch: Any) -> float:
    """Seconds that a copy of a batch to the first GPU takes; 0 without one, or where it lies there.

    Args:
        batch: Tensors; nothing of it is changed.
    """
    tf: Any = sys.modules["tensorflow"]
    if not tf.config.list_logical_devices("GPU"):
        return 0.0
    try:
        return copied_s(batch, device="GPU:0")
    except tf.errors.OpError as error:
        # No memory left for a copy: the step itself is measured all the same.
        FACTS.failed(error)
        return 0.0


def copied_s(batch: Any, *, device: str) -> float:
    """Seconds that a copy of a batch to a device takes.

    Args:
        batch: Tensors, or arrays of NumPy's.
        device: TensorFlow's name of it.
    """
    tf: Any = sys.modules["tensorflow"]
    with tf.device("CPU:0"):
        # Texts stay with the host, and what lies on a GPU already is not copied.
        parts = [tf.convert_to_tensor(part) for part in tf.nest.flatten(batch) if _moves(part)]
    if not parts:
        return 0.0
    # The first copy finds its memory.
    _wait(_copies(tf, parts, device))
    begun_s = clock()
    for _ in range(COPIES):
        copies = _copies(tf, parts, device)
    _wait(copies)
    return (clock() - begun_s) / COPIES


def _moves(part: Any) -> bool:
    kind = getattr(getattr(part, "dtype", None), "name", "string")
    return kind not in ("string", "object", "resource", "variant") and "GPU" not in str(
        getattr(part, "device", "")
    )


def _copies(tf: Any, parts: list[Any], device: str) -> list[Any]:
    with tf.device(device):
        return [tf.identity(part) for part in parts]


def _wait(copies: list[Any]) -> None:
    """Until all are there: a device ends its copies in their order; one number is read of each."""
    tf: Any = sys.modules["tensorflow"]
    for copy in copies:
        tf.reshape(copy, [-1])[:1].numpy()
