"""Assigns requests to versions of a model, in proportion to weights."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from stoker.core.errors import Plain, UserError

T = TypeVar("T")

_BUCKET_BITS = 18
_BUCKET = (1 << _BUCKET_BITS) - 1
"""Keys are hashed to 262,144 buckets, so that a decision is one table lookup: 0.2 us instead of 2 us."""


class TrafficSplit:
    """Assigns requests to versions in proportion to weights.

    A bucket of keys belongs to the version with the best score (weighted rendezvous hashing). A key keeps its
    version while the weights stay the same; if the weights change, as few keys as possible change their version.
    The keys that a version has at 1 % still belong to it at 10 %.

    Source: Schindelhauer and Schomaker, "Weighted distributed hash tables", SPAA 2005.
    """

    def __init__(self, weights: Mapping[int, float], *, salt: str) -> None:
        """Build the table of buckets.

        Args:
            weights: Version -> its share, at least 0; the shares sum to 1.
            salt: Name of the rollout: with other salts, keys are assigned independently.

        Raises:
            UserError: a weight is below 0, or the weights do not sum to 1.
        """
        if (
            not weights
            or not all(0 <= weight <= 1 for weight in weights.values())
            or not math.isclose(sum(weights.values()), 1.0, abs_tol=1e-6)
        ):
            raise UserError(
                "The weights of a traffic split must be at least 0 and add up to 1",
                got=Plain(
                    ", ".join(f"{each}: {weight:g}" for each, weight in weights.items()) or "none"
                ),
                fix="Divide each weight by their sum.",
            )
        self.weights = dict(weights)
        self._versions = [version for version, weight in weights.items() if weight > 0]
        # Each version draws from an exponential distribution with rate `weight`; a version's draw is the smallest with
        # a probability equal to its weight.
        arrivals = [
            -np.log(_uniform(f"{salt}/{version}")) / weights[version] for version in self._versions
        ]
        self._owners = np.argmin(arrivals, axis=0).astype(np.uint8).tobytes()

    def shares(self) -> dict[int, float]:
        """Return version -> its actual share of the buckets, which differs from its weight by chance."""
        counts = np.bincount(
            np.frombuffer(self._owners, dtype=np.uint8), minlength=len(self._versions)
        )
        return {v: int(n) / len(self._owners) for v, n in zip(self._versions, counts, strict=True)}

    def version_of(self, key: bytes) -> int:
        """Return the version for a key; it is the same in all processes and on all machines."""
        return self._versions[self._owners[zlib.crc32(key) & _BUCKET]]

    def at_random(self, of_version: Mapping[int, T]) -> Callable[[object], T]:
        """Return a function that returns the value of a random version; its argument is ignored.

        Args:
            of_version: Version -> the value to return for it.
        """
        values, owners = tuple(of_version[each] for each in self._versions), self._owners
        draw = random.getrandbits
        return lambda _: values[owners[draw(_BUCKET_BITS)]]

    def by_crc(self, of_version: Mapping[int, T]) -> Callable[[int], T]:
        """Return a function that returns the value of a key's version, given the CRC-32 of the key.

        Args:
            of_version: Version -> the value to return for it.
        """
        values, owners = tuple(of_version[each] for each in self._versions), self._owners
        return lambda crc: values[owners[crc & _BUCKET]]

    def any_version(self) -> int:
        """Return a random version, for a request without a key."""
        return self._versions[self._owners[random.getrandbits(_BUCKET_BITS)]]


def _uniform(name: str) -> NDArray[np.float64]:
    """Return a pseudorandom number in (0, 1] for each bucket, determined by a name (splitmix64)."""
    seed = np.uint64(zlib.crc32(name.encode()) << 32)
    bits = (np.arange(_BUCKET + 1, dtype=np.uint64) + seed) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return ((bits >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53
