"""Which version of a model answers a request."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Mapping

from stoker.core.errors import UserError

_MASK = (1 << 64) - 1


class TrafficSplit:
    """Assigns requests to versions in proportion to weights.

    A request with a key goes to the version with the largest score (weighted rendezvous hashing): a key keeps
    its version while the weights stand, and when they change, only as many keys move as the change asks for. The keys
    of a version at 1 % are among its keys at 10 %.

    Args:
        weights: share of each version; at least 0, with a sum of 1.
        salt: name of the rollout. Two rollouts assign the same keys independently.

    Raises:
        UserError: weights that are no shares.

    Source: Schindelhauer and Schomaker, "Weighted distributed hash tables", SPAA 2005.
    """

    def __init__(self, weights: Mapping[int, float], *, salt: str) -> None:
        if (
            not weights
            or not all(0 <= weight <= 1 for weight in weights.values())
            or not math.isclose(sum(weights.values()), 1.0, abs_tol=1e-6)
        ):
            raise UserError(
                "The weights of a traffic split must be at least 0 and add up to 1",
                got=", ".join(f"{version}: {weight:g}" for version, weight in weights.items())
                or "none",
                fix="Divide each weight by their sum.",
            )
        self.weights = dict(weights)
        self._versions = [
            (version, weight, _mix(zlib.crc32(f"{salt}/{version}".encode())))
            for version, weight in weights.items()
            if weight > 0
        ]

    def version_of(self, key: bytes) -> int:
        """The version for a key, the same in each process and on each machine."""
        hashed = zlib.crc32(key) | len(key) << 32
        best, chosen = math.inf, 0
        for version, weight, seed in self._versions:
            # An exponential variable with rate `weight`: the smallest of all is of this version with that share.
            arrival = -math.log((_mix(hashed ^ seed) + 1) * 2.0**-64) / weight
            if arrival < best:
                best, chosen = arrival, version
        return chosen

    def any_version(self) -> int:
        """A version for a request without a key, at random."""
        left = random.random()  # noqa: S311 - no secret
        for version, weight, _ in self._versions:
            left -= weight
            if left < 0:
                return version
        return self._versions[-1][0]


def _mix(number: int) -> int:
    """64 bits, each of which depends on each bit of the number (splitmix64's last step)."""
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    number = (number ^ number >> 27) * 0x94D049BB133111EB & _MASK
    return number ^ number >> 31
