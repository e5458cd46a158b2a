"""Measures the peak rates that this device reaches: matrix products and convolutions.

A data sheet's figure assumes a clock, a power limit and a precision that this machine may not
have, and a CPU has no such figure; so the peak is measured, like the step itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import tensorflow as tf

from stoker.core.errors import ConfigError
from stoker.measure.operation_tally import Kind

DTYPES = ("float16", "bfloat16", "float32", "float64")
"""Kinds of operations that can be measured."""

PRODUCT_SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""Rows and columns of the multiplied squares: from a core's cache to the size that fills a large device."""

CONVOLUTIONS = (
    (8, 56, 64),
    (32, 28, 128),
    (32, 14, 256),
    (64, 56, 64),
    (256, 14, 256),
    (256, 28, 256),
)
"""(images, height and width, channels in and out) of 3 x 3 convolutions, as residual networks have
them; by operations, ascending."""

QUICK_PRODUCTS = {"GPU": (8192, 4096, 2048), "CPU": (1024,)}
"""Sizes of `quick_peak`; the first one is used that fits in the memory left by training. A large
GPU needs 1.1 TFLOP in one call to be fully used."""

QUICK_CONVOLUTIONS = {
    "GPU": ((256, 28, 256), (256, 14, 256), (32, 14, 256)),
    "CPU": ((8, 56, 64),),
}
"""The same for convolutions, as in `CONVOLUTIONS`."""

AT_ONCE = 4
"""Operations of one turn of the loop, so that the loop itself costs almost nothing."""

ROUNDS = 3
"""Number of measurements of each size, in turn: other load on the machine affects all sizes alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakFlops:
    """The best rate of several sizes."""

    dtype: str
    """The dtype."""

    device: str
    """TensorFlow's name of the device."""

    products_per_s: float
    """Floating-point operations per second of matrix products."""

    convolutions_per_s: float
    """The same for convolutions."""

    product_size: int
    """The matrix size with this rate."""

    convolution_size: tuple[int, int, int]
    """The convolution size (images, height and width, channels) with this rate."""


@dataclass(kw_only=True, slots=True)
class _Candidate:
    size: int | tuple[int, int, int]
    flops: float
    """Operations of one turn of the loop."""
    run: Callable[[int], float]
    """Runs some turns; returns their seconds."""
    turn_s: float = 0.0
    best_per_s: float = 0.0


def measure_peak_flops(dtype: str, *, seconds: float) -> PeakFlops:
    """Measure matrix products and convolutions of several sizes, and return the highest rates.

    Each is a `tf.function` on the default device, waited for at its end. A size is left out where
    a turn of it would take more than its share of the time, or more than the free memory.

    Args:
        dtype: One of `DTYPES`.
        seconds: Total time, seconds; tracing and the smallest sizes may take longer.

    Raises:
        ConfigError: the type is unknown, or the time is not above 0.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"the type of a peak must be one of {', '.join(DTYPES)}", got=dtype)
    if not seconds > 0:
        raise ConfigError("a peak takes more than 0 seconds to measure", got=seconds)
    kind = tf.as_dtype(dtype)
    products = _best(_products(kind), seconds=seconds / 2)
    convolutions = _best(_convolutions(kind), seconds=seconds / 2)
    assert isinstance(products.size, int)
    assert isinstance(convolutions.size, tuple)
    return PeakFlops(
        dtype=dtype,
        device=tf.zeros([], kind).device,
        products_per_s=products.best_per_s,
        convolutions_per_s=convolutions.best_per_s,
        product_size=products.size,
        convolution_size=convolutions.size,
    )


def quick_peak(dtype: str, kind: Kind, *, seconds: float) -> float:
    """The rate of one size that fully uses most devices, operations per second.

    For use during training: only one kernel has to be found, not those of all sizes.

    Args:
        dtype: One of `DTYPES`.
        kind: Matrix products or convolutions.
        seconds: Measuring time, seconds, without tracing and the first call.

    Raises:
        tf.errors.ResourceExhaustedError: not even the smallest size fits in memory.
    """
    where = "GPU" if tf.config.list_logical_devices("GPU") else "CPU"
    number = tf.as_dtype(dtype)
    candidates: list[Callable[[], Iterator[_Candidate]]]
    if kind == "convolutions":
        candidates = [partial(_convolutions, number, (each,)) for each in QUICK_CONVOLUTIONS[where]]
    else:
        candidates = [partial(_products, number, (each,)) for each in QUICK_PRODUCTS[where]]
    for candidate in candidates[:-1]:
        with suppress(tf.errors.ResourceExhaustedError):
            return _best(candidate(), seconds=seconds).best_per_s
    return _best(candidates[-1](), seconds=seconds).best_per_s


def _best(candidates: Iterator[_Candidate], *, seconds: float) -> _Candidate:
    fitting = _that_fit(candidates, share_s=seconds / (2 * ROUNDS))
    window_s = seconds / 2 / (ROUNDS * len(fitting))
    for _ in range(ROUNDS):
        for candidate in fitting:
            turns = max(1, int(window_s / candidate.turn_s))
            rate = turns * candidate.flops / candidate.run(turns)
            candidate.best_per_s = max(candidate.best_per_s, rate)
    return max(fitting, key=lambda candidate: candidate.best_per_s)


def _that_fit(candidates: Iterator[_Candidate], *, share_s: float) -> list[_Candidate]:
    """The smallest size, and all that take less than their share of the time; each is warmed up."""
    fitting: list[_Candidate] = []
    per_s = 0.0
    for candidate in candidates:
        if fitting and candidate.flops / per_s > share_s / 2:
            break
        try:
            # The first call traces it and finds the kernel, the second one gives its duration.
            candidate.run(1)
            candidate.turn_s = max(candidate.run(1), 1e-9)
        except tf.errors.ResourceExhaustedError:
            if not fitting:
                raise
            break
        fitting.append(candidate)
        per_s = max(per_s, candidate.flops / candidate.turn_s)
    return fitting


def _products(kind: tf.DType, sizes: Sequence[int] = PRODUCT_SIZES) -> Iterator[_Candidate]:
    for size in sizes:
        # So that the numbers stay in range, however often they are multiplied.
        factor = _normal([size, size], kind, scale=size**-0.5)
        start = _normal([size, size], kind, scale=1.0)

        def once(given: tf.Tensor, factor: tf.Tensor) -> tf.Tensor:
            return tf.linalg.matmul(given, factor)

        yield _Candidate(size=size, flops=AT_ONCE * 2.0 * size**3, run=_runner(once, start, factor))


def _convolutions(
    kind: tf.DType, sizes: Sequence[tuple[int, int, int]] = CONVOLUTIONS
) -> Iterator[_Candidate]:
    for images, side, channels in sizes:
        kernel = _normal([3, 3, channels, channels], kind, scale=(9 * channels) ** -0.5)
        start = _normal([images, side, side, channels], kind, scale=1.0)

        def once(given: tf.Tensor, kernel: tf.Tensor) -> tf.Tensor:
            return tf.nn.conv2d(given, kernel, strides=1, padding="SAME")

        yield _Candidate(
            size=(images, side, channels),
            flops=AT_ONCE * 2.0 * images * side**2 * 9 * channels**2,
            run=_runner(once, start, kernel),
        )


def _runner(
    once: Callable[[tf.Tensor, tf.Tensor], tf.Tensor], start: tf.Tensor, factor: tf.Tensor
) -> Callable[[int], float]:
    @tf.function
    def turns(start: tf.Tensor, factor: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        given = start
        for _ in tf.range(number):  # type: ignore[attr-defined]  # AutoGraph's loop
            for _ in range(AT_ONCE):
                given = once(given, factor)
        # One number: the call waits for it, and nothing large is copied from the device.
        return tf.reduce_max(given)

    def run(number: int) -> float:
        begun_s = time.monotonic()
        turns(start, factor, tf.constant(number)).numpy()
        return time.monotonic() - begun_s

    return run


def _normal(shape: list[int], kind: tf.DType, *, scale: float) -> tf.Tensor:
    made = tf.random.stateless_normal(shape, seed=(0, 0), stddev=scale)
    return tf.cast(made, kind)
