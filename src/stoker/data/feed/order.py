"""The order of samples: a pure function of (seed, epoch, position), with no state to save.

The order is a permutation of [0, size): a keyed Feistel network over the smallest domain of an even number of
bits that holds `size`. A result outside [0, size) is permuted again until it is inside ("cycle walking"). Each
position can be computed independently of the others, so a run can resume at any position.

Source: Black and Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002, section 4.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 6
"""Four rounds make a strong pseudo-random permutation of a large domain; tiny domains need two more."""

_GOLDEN = 0x9E3779B97F4A7C15
"""2**64 divided by the golden ratio: the increment of splitmix64."""


def shuffled_indices(
    positions: NDArray[np.int64], *, size: int, seed: int, epoch: int
) -> NDArray[np.int64]:
    """Return the samples of the dataset at these positions of an epoch.

    Args:
        positions: [n] positions within the epoch, each in [0, size).
        size: Number of samples in the dataset.
        seed: The run's seed.
        epoch: The epoch, from 0; every epoch has a different order.

    Returns:
        [n] indices into the dataset. Over all positions, each index appears exactly once.
    """
    if size <= 1:
        return np.zeros(len(positions), np.int64)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    rounds = _rounds(_round_keys(seed, epoch), half_bits, lookups=len(positions))
    indices = _feistel(positions, half_bits, rounds)
    outside = np.flatnonzero(indices >= size)
    while len(outside):
        again = _feistel(indices[outside], half_bits, rounds)
        indices[outside] = again
        outside = outside[again >= size]
    return indices


_Round = Callable[[NDArray[np.int64]], NDArray[np.int64]]


def _rounds(keys: list[int], half_bits: int, *, lookups: int) -> list[_Round]:
    mask = np.uint64((1 << half_bits) - 1)

    def computed(key: int) -> _Round:
        return lambda half: (mixed(half.astype(np.uint64) + np.uint64(key)) & mask).view(np.int64)

    if lookups < 1 << half_bits:
        return [computed(key) for key in keys]
    # A round has only 2**half_bits different inputs, so a table of all results takes a third of the time.
    every = np.arange(1 << half_bits)
    return [computed(key)(every).take for key in keys]


def _feistel(values: NDArray[np.int64], half_bits: int, rounds: list[_Round]) -> NDArray[np.int64]:
    left, right = values >> half_bits, values & ((1 << half_bits) - 1)
    for of_half in rounds:
        left, right = right, left ^ of_half(right)
    return (left << half_bits) | right


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return splitmix64's finalizer of each value: a bijection; every input bit affects every output bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _round_keys(seed: int, epoch: int) -> list[int]:
    state = np.array([seed % 2**64], np.uint64)
    state = mixed(state + np.uint64(_GOLDEN)) ^ np.uint64(epoch % 2**64)
    keys = []
    for _ in range(_ROUNDS):
        state = state + np.uint64(_GOLDEN)
        # Keys are below 2**63, so that the sum of a key and half of a value cannot overflow.
        keys.append(int(mixed(state)[0] >> np.uint64(1)))
    return keys
