"""Numbers and strings to bucket ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from stoker.core.errors import ConfigError, DataError, Plain
from stoker.data.features.analyzers import EXACT_IN_FLOAT64
from stoker.data.features.preprocessing.tft_arguments import IGNORED, also_takes
from stoker.data.features.preprocessing.trace import (
    Domain,
    active,
    required,
    required_numbers,
    required_whole,
)


@also_takes(epsilon=IGNORED, weights=None, elementwise=False, name=IGNORED)
def bucketize(x: tf.Tensor, num_buckets: int) -> tf.Tensor:
    """Part x into buckets that hold equally many of the training split's values.

    Args:
        x: [batch, ...] numbers.
        num_buckets: How many, at least 1.

    Returns:
        Of x's shape, int64 in [0, num_buckets); a value equal to a boundary is above it. NaN goes
        to the last bucket. Values that the data repeats can leave buckets empty.

    Source: `tft.bucketize`; there the boundaries are approximate and float32, here exact.
    """
    boundaries = _boundaries("bucketize", x, num_buckets)
    return apply_buckets(x, boundaries)


@also_takes(name=IGNORED)
def apply_buckets(
    x: tf.Tensor, bucket_boundaries: tf.Tensor | Sequence[Sequence[float]]
) -> tf.Tensor:
    """Part x at given boundaries; works anywhere, as it asks nothing of the data.

    Args:
        x: [batch, ...] numbers.
        bucket_boundaries: [1, boundaries] ascending, e.g. of `quantiles`, or `[[1.0, 5.0]]`. For
            64-bit integers beyond 2^53 write integers, which are compared exactly.

    Returns:
        Of x's shape, int64 in [0, boundaries]; a value equal to a boundary is above it. NaN goes to
        the last bucket.

    Raises:
        ConfigError: the boundaries have not the shape [1, boundaries].

    Source: `tft.apply_buckets`.
    """
    required_numbers("apply_buckets", x)
    boundaries = _as_boundaries(bucket_boundaries, x.dtype)
    count = int(boundaries.shape[1] or 0)
    if not count:
        return _annotated(tf.zeros_like(x, tf.int64), 1)
    if boundaries.dtype == x.dtype and x.dtype in (tf.int64, tf.uint64):
        common = x.dtype
    else:
        common = tf.float64 if tf.float64 in (_wide(x.dtype), boundaries.dtype) else tf.float32
    flat = tf.searchsorted(
        tf.cast(boundaries[0], common),
        tf.reshape(tf.cast(x, common), [-1]),
        side="right",
        out_type=tf.int64,
    )
    ids = tf.reshape(flat, tf.shape(x))
    if x.dtype.is_floating:
        ids = tf.where(tf.math.is_nan(x), tf.constant(count, tf.int64), ids)
    ids.set_shape(x.shape)
    return _annotated(ids, count + 1)


@also_takes(epsilon=IGNORED, weights=None, reduce_instance_dims=True, name=IGNORED)
def quantiles(x: tf.Tensor, num_buckets: int) -> tf.Tensor:
    """The boundaries that part the finite values of x into buckets of equal size, exactly.

    Args:
        x: [batch, ...] numbers.
        num_buckets: How many buckets, at least 1.

    Returns:
        [1, num_buckets - 1] ascending; float64 for float64, else float32, which rounds integers
        beyond 2^24 (`bucketize` does not). Boundary i is the sorted value at position
        floor(i * n / num_buckets).

    Source: `tft.quantiles`, which approximates the same.
    """
    boundaries = _boundaries("quantiles", x, num_buckets)
    return tf.cast(boundaries, tf.float64 if x.dtype == tf.float64 else tf.float32)


@also_takes(name=IGNORED)
def hash_strings(
    strings: tf.Tensor, hash_buckets: int, key: Sequence[int] | None = None
) -> tf.Tensor:
    """Hash strings into buckets; works anywhere, as it asks nothing of the data.

    Args:
        strings: [batch, ...] strings.
        hash_buckets: How many buckets.
        key: Two whole numbers for a hash that nobody can predict; a fast one by default.

    Returns:
        Of the same shape, int64 in [0, hash_buckets). The empty string has a bucket, too.

    Raises:
        ConfigError: the tensor holds no strings, or there is less than one bucket.

    Source: `tft.hash_strings` (`tf.strings.to_hash_bucket_fast`, `_strong` with a key).
    """
    if not isinstance(strings, tf.Tensor) or strings.dtype != tf.string:
        raise ConfigError(
            "stoker.transform.hash_strings must be given a dense tensor of strings",
            got=Plain(str(getattr(strings, "dtype", type(strings).__name__))),
            fix="Turn numbers into strings first (`tf.strings.as_string`).",
        )
    required_whole("hash_buckets", hash_buckets, least=1)
    if key is None:
        ids = tf.strings.to_hash_bucket_fast(strings, hash_buckets)
    else:
        ids = tf.strings.to_hash_bucket_strong(strings, hash_buckets, list(key))
    return _annotated(ids, hash_buckets)


def _boundaries(function: str, x: tf.Tensor, num_buckets: int) -> tf.Tensor:
    """[1, num_buckets - 1] of a type that holds the values of x."""
    required_numbers(function, x)
    required_whole("num_buckets", num_buckets, least=1)
    trace = required(function, x)
    call = trace.ask("quantiles", x, num_buckets=num_buckets)
    found = trace.answer(call)
    if found is None:
        return tf.fill([1, num_buckets - 1], tf.cast(trace.calls[call].stand_in, _wide(x.dtype)))
    if num_buckets > 1 and not found:
        raise DataError(
            f"what stoker.transform.{function} is given must hold a number in the training split",
            got=Plain("only missing values"),
            fix="Leave the column out.",
        )
    return tf.constant([found], _holding(found, x.dtype), shape=[1, num_buckets - 1])


def _as_boundaries(given: tf.Tensor | Sequence[Sequence[float]], dtype: tf.DType) -> tf.Tensor:
    if isinstance(given, tf.Tensor):
        boundaries = given
    else:
        numbers = np.array(given, object).ravel()
        boundaries = tf.convert_to_tensor(given, _holding(numbers, dtype))
    if boundaries.shape.rank != 2 or boundaries.shape[0] != 1 or boundaries.shape[1] is None:
        raise ConfigError(
            "bucket_boundaries must have the shape [1, boundaries]",
            got=Plain(str(boundaries.shape)),
            fix="Write them as [[1.0, 5.0]], or take them from stoker.transform.quantiles.",
        )
    return boundaries


def _holding(numbers: Iterable[Any], dtype: tf.DType) -> tf.DType:
    """The type of boundaries for values of a type: the type itself for integers beyond 2^53."""
    whole = [number for number in numbers if isinstance(number, int)]
    is_beyond = max(map(abs, whole), default=0) > EXACT_IN_FLOAT64
    return dtype if is_beyond and dtype in (tf.int64, tf.uint64) else _wide(dtype)


def _wide(dtype: tf.DType) -> tf.DType:
    exact = dtype in (tf.float16, tf.bfloat16, tf.float32, tf.int8, tf.uint8, tf.int16, tf.uint16)
    return tf.float32 if exact else tf.float64


def _annotated(ids: tf.Tensor, num_buckets: int) -> tf.Tensor:
    trace = active()
    if trace is not None:
        trace.domains[ids.ref()] = Domain(num_buckets=num_buckets)
    return ids
