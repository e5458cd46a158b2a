"""Settings of an A/B test: its arms, and how a key's outcomes become one value."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from typing import Any

from stoker.core.errors import ConfigError, Plain
from stoker.rollout.state.stages import SMALLEST_SHARE
from stoker.rollout.statistics.confidence_sequence import ALPHA

MAX_KEYS = 1_000_000
"""Default maximum number of recorded keys: about 100 MiB in each server."""

LARGEST_OUTCOME = 1e100
"""Largest accepted outcome: the squares of 1,000,000 of them still have a finite sum."""

_KEY_BYTES = 8
"""Length of a key's hash, bytes: among 1,000,000 keys, two have the same hash with probability 3 in 100,000,000."""


class Metric(StrEnum):
    """How a key's outcomes become one value: the first outcome, or the sum."""

    FIRST = "first"
    SUM = "sum"


@dataclass(frozen=True, kw_only=True, slots=True)
class ABTestSettings:
    """An A/B test of two or more versions."""

    arms: tuple[tuple[int, float], ...]
    """The arms: version, and share of the keys in (0, 1)."""

    baseline: int
    """The arm that the others are compared with; requests without the key go there."""

    salt: str
    """Secret key of the hash function for keys, hexadecimal."""

    metric: Metric = Metric.FIRST
    """How the outcomes of a key become one value."""

    max_value: float | None = None
    """Largest accepted outcome; the smallest is 0. None: no bound, so the result needs more outcomes."""

    alpha: float = ALPHA
    """Probability that any interval of the test ever misses its true difference."""

    max_keys: int = MAX_KEYS
    """Maximum number of recorded keys; requests of further keys get a version, but are not part of the result."""

    def __post_init__(self) -> None:
        if not 0.0 < self.alpha < 1.0 or self.max_keys < 1:
            raise ConfigError(
                "alpha must be between 0 and 1, and max_keys at least 1",
                got=Plain(f"{self.alpha:g}, {self.max_keys}"),
                fix="Leave them out to use the defaults.",
            )
        if self.baseline not in self.shares:
            raise ConfigError(
                "The baseline of an A/B test must be one of its arms",
                got=Plain(f"version {self.baseline}"),
                fix=f"Choose one of {', '.join(map(str, self.shares))} with --baseline.",
            )
        if self.max_value is not None and not (
            self.metric is Metric.FIRST and 0.0 < self.max_value < math.inf
        ):
            raise ConfigError(
                "max_value must be a number above 0, and needs the metric `first`: a sum has no bound",
                got=Plain(f"{self.max_value:g}, {self.metric}"),
                fix="Leave --max-value out.",
            )

    @property
    def shares(self) -> dict[int, float]:
        """Version -> share of the keys."""
        return dict(self.arms)

    @property
    def bounded(self) -> bool:
        """Whether outcomes are bounded (`max_value` is set)."""
        return self.max_value is not None

    def check_value(self, value: float) -> None:
        """Refuse an outcome that the test does not accept.

        Raises:
            ConfigError: the outcome is not finite, or out of bounds.
        """
        if not abs(value) <= LARGEST_OUTCOME:  # also refuses NaN
            raise ConfigError(
                f"An outcome must be a number of at most {LARGEST_OUTCOME:g}",
                got=value,
                fix="Send a smaller value, or leave the outcome out.",
            )
        if self.max_value is not None and not 0.0 <= value <= self.max_value:
            raise ConfigError(
                f"An outcome of this test must be from 0 to {self.max_value:g}",
                got=value,
                fix="To record larger outcomes, such as amounts of money, start a test without --max-value.",
            )

    def key_hash(self) -> Callable[[bytes], int]:
        """Return the hash function for keys: BLAKE2b of 64 bits, keyed with the salt."""
        keyed = hashlib.blake2b(digest_size=_KEY_BYTES, key=bytes.fromhex(self.salt))

        def hash_of(key: bytes) -> int:
            digest = keyed.copy()
            digest.update(key)
            return int.from_bytes(digest.digest(), "big")

        return hash_of

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {**asdict(self), "arms": [[*arm] for arm in self.arms], "metric": str(self.metric)}


def settings_of(content: Mapping[str, Any]) -> ABTestSettings:
    """Parse the result of `to_json`; unknown keys are left out.

    Raises:
        KeyError, TypeError, ValueError: a newer Stoker wrote it.
    """
    known = {
        each.name: content[each.name] for each in fields(ABTestSettings) if each.name in content
    }
    known["arms"] = tuple((int(version), float(share)) for version, share in known["arms"])
    known["metric"] = Metric(known["metric"])
    return ABTestSettings(**known)


def parse_arms(text: str) -> tuple[tuple[int, float], ...]:
    """Parse text such as `5=50,6=30,7=20` into the version and share of each arm.

    Raises:
        ConfigError: an arm does not have this form or occurs twice, there is only one arm, or the percentages do not
            sum to 100.
    """
    fix = "Write two or more VERSION=PERCENT that sum to 100, such as 5=50,6=30,7=20."
    arms: dict[int, float] = {}
    for item in text.replace(" ", "").split(","):
        version, _, percent = item.partition("=")
        try:
            number, share = int(version), float(percent.removesuffix("%"))
        except ValueError:
            raise ConfigError(f"{item!r} is not an arm of an A/B test", got=text, fix=fix) from None
        if number < 0 or number in arms:
            raise ConfigError(
                "Each arm of an A/B test must be a different version", got=text, fix=fix
            )
        arms[number] = share
    if len(arms) < 2 or not all(SMALLEST_SHARE <= share / 100.0 < 1.0 for share in arms.values()):
        raise ConfigError(
            "An A/B test must have at least two arms, each of at least 0.01 %", got=text, fix=fix
        )
    if not math.isclose(sum(arms.values()), 100.0, abs_tol=1e-6):
        raise ConfigError(
            "The weights of an A/B test must sum to 100",
            got=Plain(f"{text}, which is {sum(arms.values()):g}"),
            fix=fix,
        )
    return tuple((version, share / 100.0) for version, share in arms.items())
