"""Whether a dataset gives the same in every pass: then keeping the first changes no training."""

from __future__ import annotations

import hashlib
from typing import Any

import tensorflow as tf

from stoker.data.feed.options import as_written

BATCHES = 16
"""How many batches are compared where nobody says: a shuffle shows in the first."""


def passes_agree(dataset: tf.data.Dataset[Any], *, batches: int = BATCHES) -> bool:
    """Compare the beginnings of two passes, byte by byte.

    Args:
        dataset: Any that ends; nothing of it changes.
        batches: How many elements of each pass are read and compared.

    Returns:
        Whether they are equal, in type, shape and every byte. What differs later is not seen. A
        dataset that keeps its own first pass (`.cache()`) is seen as if it did not, where that pass
        has more elements than are read.

    Raises:
        tf.errors.OpError: the dataset failed.
    """
    # As training repeats it: by one iterator, in which the state of random maps goes on.
    both = as_written(dataset.take(batches).repeat(2))
    seen = [_digest(element) for element in both]
    half, odd = divmod(len(seen), 2)
    return not odd and seen[:half] == seen[half:]


def _digest(element: Any) -> bytes:
    told = hashlib.sha256()
    for tensor in tf.nest.flatten(element):
        told.update(tf.io.serialize_tensor(tensor).numpy())
    return told.digest()
