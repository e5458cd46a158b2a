"""Scalers and the single numbers that they are made of.

What differs from TensorFlow Transform, because a missing value is a NaN here and not a gap in a
sparse tensor: analyzers leave missing values out; a NaN passes through a scaler as NaN. Scalers
multiply by a stored reciprocal, and add nothing after the product, so that eager, graph, tf.data
and XLA agree to the bit (XLA may fuse a product and a sum). Integers beyond 2^53, which float64 would
round, are scaled by their exact difference from the mean or the smallest value.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import tensorflow as tf

from stoker.core.errors import ConfigError, Plain
from stoker.data.features.analyzers import Moments
from stoker.data.features.preprocessing.tft_arguments import IGNORED, also_takes
from stoker.data.features.preprocessing.trace import required, required_numbers


@also_takes(elementwise=False, name=IGNORED, output_dtype=None)
def scale_to_z_score(x: tf.Tensor) -> tf.Tensor:
    """Subtract the mean, multiply by the reciprocal of the standard deviation.

    Args:
        x: [batch, ...] numbers; all values of all rows share one mean and one deviation.

    Returns:
        Of x's shape; float64 for float64, else float32. NaN stays NaN. A column with one distinct
        value (or none) is only shifted by its mean.

    Source: `tft.scale_to_z_score` (biased variance; NaN and infinities left out of both).
    """
    moments, stand_in = _moments("scale_to_z_score", x)
    dtype = tf.float64 if x.dtype == tf.float64 else tf.float32
    if moments is None:
        return tf.cast(x, dtype) + tf.cast(stand_in, dtype)
    factor = None if moments.is_constant else _finite_ratio(1.0, math.sqrt(moments.var))
    return _scale(x, shift=moments.mean, factor=factor or 1.0, dtype=dtype)


@also_takes(elementwise=False, name=IGNORED)
def scale_to_0_1(x: tf.Tensor) -> tf.Tensor:
    """Scale to [0, 1] by the smallest and largest value; see `scale_by_min_max`.

    Args:
        x: [batch, ...] numbers.

    Returns:
        Of x's shape, float32.

    Source: `tft.scale_to_0_1`.
    """
    return _scale_between("scale_to_0_1", x, 0.0, 1.0)


@also_takes(elementwise=False, name=IGNORED)
def scale_by_min_max(x: tf.Tensor, output_min: float = 0.0, output_max: float = 1.0) -> tf.Tensor:
    """Scale to [output_min, output_max] by the smallest and largest finite value.

    Args:
        x: [batch, ...] numbers; all values of all rows share one range.
        output_min: What the smallest value becomes.
        output_max: What the largest becomes.

    Returns:
        Of x's shape, float32. NaN stays NaN; a value outside of the training split's range lands
        outside. A column with one distinct value (or none) is `sigmoid(x)`, brought to the range.

    Raises:
        ConfigError: `output_min` is not below `output_max`.

    Source: `tft.scale_by_min_max`; there an infinity in the data is the range's end.
    """
    return _scale_between("scale_by_min_max", x, output_min, output_max)


@also_takes(reduce_instance_dims=True, name=IGNORED, output_dtype=None)
def mean(x: tf.Tensor) -> tf.Tensor:
    """The mean of all finite values of x over the training split.

    Returns:
        A scalar: of x's type where that is a float, else float32. 0 where there is no value.

    Source: `tft.mean` ("NaNs and infinite input values are ignored").
    """
    moments, stand_in = _moments("mean", x)
    return _constant(None if moments is None else moments.mean, stand_in, _float_type(x))


@also_takes(reduce_instance_dims=True, name=IGNORED, output_dtype=None)
def var(x: tf.Tensor) -> tf.Tensor:
    """The biased variance of all finite values of x over the training split.

    Returns:
        A scalar: of x's type where that is a float, else float32. 0 where there is no value.

    Source: `tft.var` (0 delta degrees of freedom).
    """
    moments, stand_in = _moments("var", x)
    return _constant(None if moments is None else moments.var, stand_in, _float_type(x))


@also_takes(reduce_instance_dims=True, name=IGNORED)
def min(x: tf.Tensor) -> tf.Tensor:  # noqa: A001
    """The smallest value of x over the training split; NaN is left out, an infinity is not.

    Returns:
        A scalar of x's type; NaN where there is no value.

    Source: `tft.min`.
    """
    return _limit("min", x, 0)


@also_takes(reduce_instance_dims=True, name=IGNORED)
def max(x: tf.Tensor) -> tf.Tensor:  # noqa: A001
    """The largest value of x over the training split; NaN is left out, an infinity is not.

    Returns:
        A scalar of x's type; NaN where there is no value.

    Source: `tft.max`.
    """
    return _limit("max", x, 1)


def _moments(function: str, x: tf.Tensor) -> tuple[Moments | None, tf.Tensor]:
    required_numbers(function, x)
    trace = required(function, x)
    call = trace.ask("moments", x)
    return trace.answer(call), trace.calls[call].stand_in


def _limit(function: str, x: tf.Tensor, end: int) -> tf.Tensor:
    required_numbers(function, x)
    trace = required(function, x)
    call = trace.ask("range", x)
    limits = trace.answer(call)
    return _constant(None if limits is None else limits[end], trace.calls[call].stand_in, x.dtype)


def _constant(value: float | Fraction | None, stand_in: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    if value is None:
        return tf.cast(stand_in, dtype)
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
    moments, stand_in = _moments(function, x)
    if moments is None:
        return tf.cast(x, tf.float32) + tf.cast(stand_in, tf.float32)
    factor = _finite_ratio(high - low, moments.high - moments.low)
    if moments.is_constant or factor is None:
        return tf.sigmoid(tf.cast(x, tf.float32)) * (high - low) + low
    offset = low / factor
    is_exact = isinstance(moments.mean, Fraction)
    shift = moments.low - Fraction(offset) if is_exact else moments.low - offset
    return _scale(x, shift=shift, factor=factor, dtype=tf.float32)


def _scale(x: tf.Tensor, *, shift: float | Fraction, factor: float, dtype: tf.DType) -> tf.Tensor:
    """(x - shift) * factor; what float32 cannot hold is subtracted in float64."""
    if isinstance(shift, Fraction):
        away = _difference(x, shift)
    else:
        wide = tf.float64 if x.dtype == tf.float64 or x.dtype.is_integer else tf.float32
        away = tf.cast(x, wide) - tf.constant(shift, wide)
    return tf.cast(away, dtype) * tf.constant(factor, dtype)


def _difference(x: tf.Tensor, shift: Fraction) -> tf.Tensor:
    """X - shift of 64-bit integers, rounded to float64 once: by halves, which cannot overflow."""
    upper = tf.bitwise.right_shift(x, tf.constant(_HALF_BITS, x.dtype))
    lower = tf.bitwise.bitwise_and(x, tf.constant(2**_HALF_BITS - 1, x.dtype))
    upper_shift = math.floor(shift / 2**_HALF_BITS)
    lower_shift = float(shift - upper_shift * 2**_HALF_BITS)
    # A product with a power of two is exact, so XLA may fuse it with the sum.
    above = (tf.cast(upper, tf.float64) - float(upper_shift)) * float(2**_HALF_BITS)
    return above + (tf.cast(lower, tf.float64) - lower_shift)


_HALF_BITS = 32


def _finite_ratio(over: float, under: float) -> float | None:
    """A ratio that float32 can hold, None where it cannot: then there is nothing to scale by."""
    ratio = over / under if under > 0 else math.inf
    return ratio if 0 < ratio < float(np.finfo(np.float32).max) else None
