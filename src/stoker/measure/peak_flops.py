"""Measures the peak rates that this device reaches in matrix products and convolutions.

A data sheet's peak assumes a clock, a power limit and a precision that this machine may not
have, and a CPU's data sheet has no peak. So the peak is measured, like the step itself.
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
"""Dtypes whose peak can be measured."""

PRODUCT_SIZES = (256, 512, 1024, 2048, 4096, 8192)
"""Sizes of the multiplied square matrices: from one that fits in a core's cache to one that fills a large GPU."""

CONVOLUTIONS = (
    (8, 56, 64),
    (32, 28, 128),
    (32, 14, 256),
    (64, 56, 64),
    (256, 14, 256),
    (256, 28, 256),
)
"""(images, height and width, channels in and out) of 3 x 3 convolutions as in residual networks; sorted
by number of operations, ascending."""

QUICK_PRODUCTS = {"GPU": (8192, 4096, 2048), "CPU": (1024,)}
"""Sizes for `quick_peak`, which uses the first one that fits in the memory left by training. A large
GPU needs 1.1 TFLOP in one call to be fully used."""

QUICK_CONVOLUTIONS = {
    "GPU": ((256, 28, 256), (256, 14, 256), (32, 14, 256)),
    "CPU": ((8, 56, 64),),
}
"""The same for convolutions; each size as in `CONVOLUTIONS`."""

AT_ONCE = 4
"""Number of products or convolutions per iteration of the loop, so that the loop's own cost is negligible."""

ROUNDS = 3
"""Number of measurements of each size. All sizes are measured once per round, so that other programs on the
machine affect all of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeakFlops:
    """The best rates of matrix products and of convolutions over several sizes."""

    dtype: str
    """Dtype of the measured operations."""

    device: str
    """TensorFlow's name of the device."""

    products_per_s: float
    """Floating-point operations per second of matrix products."""

    convolutions_per_s: float
    """Floating-point operations per second of convolutions."""

    product_size: int
    """The matrix size that reached `products_per_s`."""

    convolution_size: tuple[int, int, int]
    """The convolution size (images, height and width, channels) that reached `convolutions_per_s`."""


@dataclass(kw_only=True, slots=True)
class _Candidate:
    size: int | tuple[int, int, int]
    flops: float
    """Floating-point operations per iteration of the loop."""
    run: Callable[[int], float]
    """Runs this many iterations; returns the time that they took, seconds."""
    iteration_s: float = 0.0
    best_per_s: float = 0.0


def measure_peak_flops(dtype: str, *, seconds: float) -> PeakFlops:
    """Measure matrix products and convolutions of several sizes, and return the highest rates.

    Each size runs in a `tf.function` on the default device, timed until its result is ready. A size is
    left out if one iteration would take more than the size's share of the time, or more than the free
    memory.

    Args:
        dtype: One of `DTYPES`.
        seconds: Total measuring time, seconds; tracing and the smallest sizes may need more.

    Raises:
        ConfigError: the dtype is unknown, or the time is not above 0.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"the dtype of a peak must be one of {', '.join(DTYPES)}", got=dtype)
    if not seconds > 0:
        raise ConfigError("the time to measure a peak must be more than 0 seconds", got=seconds)
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
    """Measure the rate of a single size that fully uses most devices, operations per second.

    It is for use during training, where `measure_peak_flops` would take too long.

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
            iterations = max(1, int(window_s / candidate.iteration_s))
            rate = iterations * candidate.flops / candidate.run(iterations)
            candidate.best_per_s = max(candidate.best_per_s, rate)
    return max(fitting, key=lambda candidate: candidate.best_per_s)


def _that_fit(candidates: Iterator[_Candidate], *, share_s: float) -> list[_Candidate]:
    """Warm up the sizes in order; return them up to the first that exceeds the memory, or half of `share_s`.

    The smallest size is returned even if it takes longer.
    """
    fitting: list[_Candidate] = []
    per_s = 0.0
    for candidate in candidates:
        if fitting and candidate.flops / per_s > share_s / 2:
            break
        try:
            # The first call traces the function and selects the kernel; the second one is timed.
            candidate.run(1)
            candidate.iteration_s = max(candidate.run(1), 1e-9)
        except tf.errors.ResourceExhaustedError:
            if not fitting:
                raise
            break
        fitting.append(candidate)
        per_s = max(per_s, candidate.flops / candidate.iteration_s)
    return fitting


def _products(kind: tf.DType, sizes: Sequence[int] = PRODUCT_SIZES) -> Iterator[_Candidate]:
    for size in sizes:
        # This scale keeps the numbers in range, however often they are multiplied.
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
    def iterations(start: tf.Tensor, factor: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
        given = start
        for _ in tf.range(number):  # type: ignore[attr-defined]  # AutoGraph's loop
            for _ in range(AT_ONCE):
                given = once(given, factor)
        # The call waits for this single number; nothing large is copied from the device.
        return tf.reduce_max(given)

    def run(number: int) -> float:
        begun_s = time.monotonic()
        iterations(start, factor, tf.constant(number)).numpy()
        return time.monotonic() - begun_s

    return run


def _normal(shape: list[int], kind: tf.DType, *, scale: float) -> tf.Tensor:
    made = tf.random.stateless_normal(shape, seed=(0, 0), stddev=scale)
    return tf.cast(made, kind)
