"""Analyzers of numbers: scalers, moments, limits, buckets and quantiles.

In TensorFlow Transform, missing values are gaps in sparse tensors; here they are NaN. Analyzers skip NaN,
and scalers return NaN for NaN. Scalers multiply by a stored reciprocal and add nothing after the product,
so that eager, graph, tf.data and XLA agree to the bit (XLA may fuse a product and a sum). For integers
beyond 2^53, which float64 would round, scalers first compute the exact difference from the mean or the
smallest value.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import tensorflow as tf

from stoker.core.errors import ConfigError, DataError, Plain
from stoker.data.features.analyzers import EXACT_IN_FLOAT64, Moments
from stoker.data.features.preprocessing.tft_arguments import IGNORED, accepts
from stoker.data.features.preprocessing.trace import (
    Domain,
    active,
    required,
    required_numbers,
    required_whole,
)


@accepts(elementwise=False, name=IGNORED, output_dtype=None)
def scale_to_z_score(x: tf.Tensor) -> tf.Tensor:
    """Subtract the mean and divide by the standard deviation.

    Args:
        x: [batch, ...] numbers; all values of all rows share one mean and one deviation.

    Returns:
        A tensor of x's shape; float64 for float64, else float32. NaN stays NaN. If x has only one distinct
        value (or none), the mean is subtracted and nothing is divided.

    Source: `tft.scale_to_z_score` (biased variance; NaN and infinities are left out of mean and variance).
    """
    moments, placeholder = _moments("scale_to_z_score", x)
    dtype = tf.float64 if x.dtype == tf.float64 else tf.float32
    if moments is None:
        return tf.cast(x, dtype) + tf.cast(placeholder, dtype)
    factor = None if moments.is_constant else _finite_ratio(1.0, math.sqrt(moments.var))
    return _scale(x, shift=moments.mean, factor=factor or 1.0, dtype=dtype)


@accepts(elementwise=False, name=IGNORED)
def scale_to_0_1(x: tf.Tensor) -> tf.Tensor:
    """Scale to [0, 1] by the smallest and largest value; see `scale_by_min_max`.

    Args:
        x: [batch, ...] numbers.

    Returns:
        A tensor of x's shape, float32.

    Source: `tft.scale_to_0_1`.
    """
    return _scale_between("scale_to_0_1", x, 0.0, 1.0)


@accepts(elementwise=False, name=IGNORED)
def scale_by_min_max(x: tf.Tensor, output_min: float = 0.0, output_max: float = 1.0) -> tf.Tensor:
    """Scale to [output_min, output_max] by the smallest and largest finite value.

    Args:
        x: [batch, ...] numbers; all values of all rows share one range.
        output_min: Result for the smallest value.
        output_max: Result for the largest value.

    Returns:
        A tensor of x's shape, float32. NaN stays NaN. A value outside the training split's range becomes
        a value outside [output_min, output_max]. If x has only one distinct value (or none), the result is
        `sigmoid(x)`, scaled to [output_min, output_max].

    Raises:
        ConfigError: `output_min` is not below `output_max`.

    Source: `tft.scale_by_min_max`; there, the range ends at infinity if the data has an infinite value.
    """
    return _scale_between("scale_by_min_max", x, output_min, output_max)


@accepts(reduce_instance_dims=True, name=IGNORED, output_dtype=None)
def mean(x: tf.Tensor) -> tf.Tensor:
    """Return the mean of all finite values of x over the training split.

    Returns:
        A scalar, of x's type if that is a float, else float32. 0 if the split contains no finite value.

    Source: `tft.mean` ("NaNs and infinite input values are ignored").
    """
    moments, placeholder = _moments("mean", x)
    return _constant(None if moments is None else moments.mean, placeholder, _float_type(x))


@accepts(reduce_instance_dims=True, name=IGNORED, output_dtype=None)
def var(x: tf.Tensor) -> tf.Tensor:
    """Return the biased variance of all finite values of x over the training split.

    Returns:
        A scalar, of x's type if that is a float, else float32. 0 if the split contains no finite value.

    Source: `tft.var` (0 delta degrees of freedom).
    """
    moments, placeholder = _moments("var", x)
    return _constant(None if moments is None else moments.var, placeholder, _float_type(x))


@accepts(reduce_instance_dims=True, name=IGNORED)
def min(x: tf.Tensor) -> tf.Tensor:  # noqa: A001 - the name in TensorFlow Transform
    """Return the smallest value of x over the training split; NaN is skipped, infinity is not.

    Returns:
        A scalar of x's type; for a float x, NaN if the split contains no number.

    Source: `tft.min`.
    """
    return _limit("min", x, 0)


@accepts(reduce_instance_dims=True, name=IGNORED)
def max(x: tf.Tensor) -> tf.Tensor:  # noqa: A001 - as `min`
    """Return the largest value of x over the training split; NaN is skipped, infinity is not.

    Returns:
        A scalar of x's type; for a float x, NaN if the split contains no number.

    Source: `tft.max`.
    """
    return _limit("max", x, 1)


def _moments(function: str, x: tf.Tensor) -> tuple[Moments | None, tf.Tensor]:
    required_numbers(function, x)
    trace = required(function, x)
    call = trace.request("moments", x)
    return trace.answer(call), trace.calls[call].placeholder


def _limit(function: str, x: tf.Tensor, end: int) -> tf.Tensor:
    required_numbers(function, x)
    trace = required(function, x)
    call = trace.request("range", x)
    limits = trace.answer(call)
    return _constant(
        None if limits is None else limits[end], trace.calls[call].placeholder, x.dtype
    )


def _constant(value: float | Fraction | None, placeholder: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if value is None:
        return tf.cast(placeholder, dtype)
    return tf.constant(float(value) if isinstance(value, Fraction) else value, dtype)


def _float_type(x: tf.Tensor) -> tf.DType:
    return x.dtype if x.dtype.is_floating else tf.float32


def _scale_between(function: str, x: tf.Tensor, low: float, high: float) -> tf.Tensor:
    if not low < high:
        raise ConfigError(
            f"output_min of stoker.transform.{function} must be below output_max",
            got=Plain(f"{low} and {high}"),
            fix="Swap them.",
        )
    moments, placeholder = _moments(function, x)
    if moments is None:
        return tf.cast(x, tf.float32) + tf.cast(placeholder, tf.float32)
    factor = _finite_ratio(high - low, moments.high - moments.low)
    if moments.is_constant or factor is None:
        return tf.sigmoid(tf.cast(x, tf.float32)) * (high - low) + low
    offset = low / factor
    is_exact = isinstance(moments.mean, Fraction)
    shift = moments.low - Fraction(offset) if is_exact else moments.low - offset
    return _scale(x, shift=shift, factor=factor, dtype=tf.float32)


def _scale(x: tf.Tensor, *, shift: float | Fraction, factor: float, dtype: tf.DType) -> tf.Tensor:
    """Return (x - shift) * factor; subtract in float64 if float32 cannot hold the values."""
    if isinstance(shift, Fraction):
        away = _difference(x, shift)
    else:
        wide = tf.float64 if x.dtype == tf.float64 or x.dtype.is_integer else tf.float32
        away = tf.cast(x, wide) - tf.constant(shift, wide)
    return tf.cast(away, dtype) * tf.constant(factor, dtype)


def _difference(x: tf.Tensor, shift: Fraction) -> tf.Tensor:
    """Return x - shift for 64-bit integers, rounded to float64 only once.

    The upper and the lower 32 bits are subtracted separately, so that neither overflows.
    """
    upper = tf.bitwise.right_shift(x, tf.constant(_HALF_BITS, x.dtype))
    lower = tf.bitwise.bitwise_and(x, tf.constant(2**_HALF_BITS - 1, x.dtype))
    upper_shift = math.floor(shift / 2**_HALF_BITS)
    lower_shift = float(shift - upper_shift * 2**_HALF_BITS)
    # A product with a power of two is exact, so XLA may fuse it with the sum.
    above = (tf.cast(upper, tf.float64) - float(upper_shift)) * float(2**_HALF_BITS)
    return above + (tf.cast(lower, tf.float64) - lower_shift)


_HALF_BITS = 32


def _finite_ratio(over: float, under: float) -> float | None:
    """Return `over / under` as a scaling factor; None if it is 0, or too large for float32."""
    ratio = over / under if under > 0 else math.inf
    return ratio if 0 < ratio < float(np.finfo(np.float32).max) else None


@accepts(epsilon=IGNORED, weights=None, elementwise=False, name=IGNORED)
def bucketize(x: tf.Tensor, num_buckets: int) -> tf.Tensor:
    """Split x into buckets that hold equal numbers of the training split's values.

    Args:
        x: [batch, ...] numbers.
        num_buckets: Number of buckets, at least 1.

    Returns:
        A tensor of x's shape, int64 in [0, num_buckets). A value that equals a boundary goes to the bucket
        above the boundary; NaN goes to the last bucket. Repeated values can leave buckets empty.

    Source: `tft.bucketize`; there, boundaries are approximate and float32; here, they are exact.
    """
    boundaries = _boundaries("bucketize", x, num_buckets)
    return apply_buckets(x, boundaries)


@accepts(name=IGNORED)
def apply_buckets(
    x: tf.Tensor, bucket_boundaries: tf.Tensor | Sequence[Sequence[float]]
) -> tf.Tensor:
    """Split x into buckets at given boundaries; works outside `preprocessing_fn`, too.

    Args:
        x: [batch, ...] numbers.
        bucket_boundaries: [1, boundaries] ascending, for example from `quantiles`, or `[[1.0, 5.0]]`. For
            64-bit integers beyond 2^53, pass integers, which are compared exactly.

    Returns:
        A tensor of x's shape, int64 in [0, boundaries]. A value that equals a boundary goes to the bucket
        above the boundary; NaN goes to the last bucket.

    Raises:
        ConfigError: the boundaries do not have the shape [1, boundaries].

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


@accepts(epsilon=IGNORED, weights=None, reduce_instance_dims=True, name=IGNORED)
def quantiles(x: tf.Tensor, num_buckets: int) -> tf.Tensor:
    """Return the exact boundaries that split the finite values of x into buckets of equal size.

    Args:
        x: [batch, ...] numbers.
        num_buckets: Number of buckets, at least 1.

    Returns:
        [1, num_buckets - 1] ascending; float64 for float64, else float32, which rounds integers
        beyond 2^24 (`bucketize` does not). Boundary i is the sorted value at position
        floor(i * n / num_buckets).

    Source: `tft.quantiles`, which returns approximate boundaries.
    """
    boundaries = _boundaries("quantiles", x, num_buckets)
    return tf.cast(boundaries, tf.float64 if x.dtype == tf.float64 else tf.float32)


@accepts(name=IGNORED)
def hash_strings(
    strings: tf.Tensor, hash_buckets: int, key: Sequence[int] | None = None
) -> tf.Tensor:
    """Hash strings into buckets; works outside `preprocessing_fn`, too.

    Args:
        strings: [batch, ...] strings.
        hash_buckets: Number of buckets.
        key: Two whole numbers for a hash that cannot be predicted; the default is a fast hash.

    Returns:
        A tensor of the same shape, int64 in [0, hash_buckets). The empty string has a bucket, too.

    Raises:
        ConfigError: the tensor does not hold strings, or `hash_buckets` is below 1.

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
    """Return [1, num_buckets - 1] boundaries; their type can hold the values of x."""
    required_numbers(function, x)
    required_whole("num_buckets", num_buckets, least=1)
    trace = required(function, x)
    call = trace.request("quantiles", x, num_buckets=num_buckets)
    found = trace.answer(call)
    if found is None:
        return tf.fill([1, num_buckets - 1], tf.cast(trace.calls[call].placeholder, _wide(x.dtype)))
    if num_buckets > 1 and not found:
        raise DataError(
            f"the input of stoker.transform.{function} must hold a number in the training split",
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
    """Return the type of boundaries for values of `dtype`: `dtype` itself for integers beyond 2^53."""
    is_beyond = any(isinstance(each, int) and abs(each) > EXACT_IN_FLOAT64 for each in numbers)
    return dtype if is_beyond and dtype in (tf.int64, tf.uint64) else _wide(dtype)


def _wide(dtype: tf.DType) -> tf.DType:
    exact = dtype in (tf.float16, tf.bfloat16, tf.float32, tf.int8, tf.uint8, tf.int16, tf.uint16)
    return tf.float32 if exact else tf.float64


def _annotated(ids: tf.Tensor, num_buckets: int) -> tf.Tensor:
    trace = active()
    if trace is not None:
        trace.domains[ids.ref()] = Domain(num_buckets=num_buckets)
    return ids
