"""The traffic split of a rollout's state as gateways express it: rules, headers, whole weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from stoker.core.config import dns_name
from stoker.core.errors import Plain, UserError
from stoker.rollout.state.state import ACTIVE, Phase, RolloutState

_SCALES = (100, 1_000, 10_000, 100_000, 1_000_000)
"""Possible sums of whole weights, smallest first, because small weights are easy to read. The Gateway API allows
weights up to 1,000,000."""

_COOKIE = "cookie:"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Routes matching requests to versions. Of several rules, the first one that matches applies."""

    weights: Mapping[int, float]
    """Version -> share of the requests. The shares sum to 1; a share may be 0."""

    header: str = ""
    """Matches requests that have this header, with any value; empty: matches all requests."""

    cookie: str = ""
    """Matches requests that have this cookie; `header` is then `cookie`."""

    sticky: bool = False
    """Whether requests with the same value of the header or cookie go to the same version."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedSplit:
    """The traffic of a model according to its state."""

    model: str
    """Name of the model."""

    state: RolloutState
    """The state that determines the split."""

    @property
    def name(self) -> str:
        """The model's name in a form that is valid for cluster objects."""
        return dns_name(self.model)

    @property
    def weights(self) -> dict[int, float]:
        """Version -> share of the requests. While a rollout is running, both versions are in it."""
        active = self.state.phase in ACTIVE
        shares = self.state.split(self.model).weights
        return {version: share for version, share in shares.items() if active or share > 0}

    @property
    def is_split(self) -> bool:
        """Whether requests are currently split, by weight or by a header."""
        return self.state.phase in (Phase.RUNNING, Phase.PAUSED, Phase.TESTING)

    @property
    def header(self) -> str:
        """The header whose requests go to the candidate; empty unless the stage uses a header."""
        return self.state.current.header if self.is_split else ""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The routing rules; the last one matches all requests."""
        key = self.state.settings.key if self.is_split else ""
        baseline = Rule(weights={self.state.baseline: 1.0})
        if self.header:
            return Rule(weights={self.state.candidate: 1.0}, header=self.header.lower()), baseline
        if not key:
            return (Rule(weights=self.weights),)
        cookie = key.removeprefix(_COOKIE) if key.startswith(_COOKIE) else ""
        header = "cookie" if cookie else key.lower()
        return Rule(weights=self.weights, header=header, cookie=cookie, sticky=True), baseline

    @property
    def versions(self) -> list[int]:
        """The versions that must be reachable, in the order of `weights`."""
        return list(self.weights)

    @property
    def summary(self) -> str:
        """A line about the split, for the top of an exported file."""
        shares = ", ".join(
            f"version {version}: {share * 100:.6g} %" for version, share in self.weights.items()
        )
        stage = f", stage {self.state.current}" if self.is_split and not self.state.is_test else ""
        return f"{self.model}, rollout {self.state.rollout}, {self.state.phase}{stage}; {shares}"


def whole_weights(weights: Mapping[int, float]) -> dict[int, int]:
    """Return shares as whole numbers. Their sum is the smallest of `_SCALES` for which no share has to be rounded.

    If shares must be rounded even with the largest sum, a share above 0 becomes at least 1.
    """
    whole: dict[int, int] = {}
    for scale in _SCALES:
        whole = {
            version: max(round(share * scale), 1 if share > 0 else 0)
            for version, share in weights.items()
        }
        if all(abs(whole[each] / scale - share) < 1e-9 for each, share in weights.items()):
            break
    largest = max(whole, key=lambda version: whole[version])
    whole[largest] += scale - sum(whole.values())
    return whole


def percentages(split: ExportedSplit, *, program: str) -> dict[int, int]:
    """Return shares as whole percentages, for programs that accept neither fractions nor headers.

    Args:
        split: The model's traffic split.
        program: Name of the program, for errors.

    Raises:
        UserError: the stage uses a header, or its percentage is not whole.
    """
    instead = "Use `--to httproute` or `--to envoy`, or wait for a stage with a whole percentage."
    if split.header:
        raise UserError(
            f"{program} splits traffic by percentages, not by headers",
            got=Plain(f"stage header={split.header}"),
            fix=instead,
        )
    whole = whole_weights(split.weights)
    if sum(whole.values()) != _SCALES[0]:
        raise UserError(f"{program} takes whole percentages", got=Plain(split.summary), fix=instead)
    return whole
