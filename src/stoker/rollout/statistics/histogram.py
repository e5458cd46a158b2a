"""Histograms whose buckets are the same on every server, so that counts of several servers can be added.

The first 14 bits of a float32 are its bucket: 32 buckets between two powers of two, each about 3 % wide.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

_DROPPED_BITS = 18
"""Number of bits of a float32's fraction that are dropped: 18 of 23; 5 remain."""


def buckets_of(values: NDArray[np.floating]) -> NDArray[np.int64]:
    """Return the bucket of each number; the order of buckets is the order of numbers.

    Args:
        values: Finite numbers, in an array of any shape. A number beyond float32's range counts as float32's largest
            number.
    """
    largest = np.finfo(np.float32).max
    bits = np.clip(values, -largest, largest).astype(np.float32).view(np.int32).astype(np.int64)
    # For negative floats, larger numbers have smaller bit patterns, so the order is reversed here.
    return np.where(bits < 0, -(bits & 0x7FFFFFFF), bits) >> _DROPPED_BITS


@functools.lru_cache(maxsize=4096)
def upper_edge(bucket: int) -> float:
    """Return the smallest number above all numbers of a bucket."""
    bits = (bucket + 1) << _DROPPED_BITS
    return float(np.copysign(np.int32(abs(bits)).view(np.float32), bits))


def quantile(counts: Mapping[int, int], share: float) -> float:
    """Return an upper bound of a quantile, at most 3 % above it; NaN if the counts are empty.

    Args:
        counts: Bucket -> number of values in it.
        share: Share of the numbers that are at most the quantile, in (0, 1].
    """
    left = share * sum(counts.values())
    for bucket in sorted(counts):
        left -= counts[bucket]
        if left <= 1e-9:
            return upper_edge(bucket)
    return float("nan")


def count_above(counts: Mapping[int, int], limit: float) -> int:
    """Return the number of values in buckets whose upper edge is above a limit."""
    return sum(count for bucket, count in counts.items() if upper_edge(bucket) > limit)


def count(values: NDArray[np.floating]) -> Counter[int]:
    """Return bucket -> number of values in it."""
    return Counter(buckets_of(values.ravel()).tolist())


def aligned(
    one: Mapping[int, int], other: Mapping[int, int]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return both counts as arrays over the same buckets, in ascending order."""
    buckets = sorted(one.keys() | other.keys())
    first, second = (
        np.array([counts.get(bucket, 0) for bucket in buckets], np.int64) for counts in (one, other)
    )
    return first, second
