"""Counts the results of a shadow stage, and summarizes them.

Only copied requests are counted: each version answers each of them once, so the gates see equal traffic.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stoker.rollout.counts.counted_keys import Once, StageKeys
from stoker.rollout.gates.gates import VersionCounts
from stoker.rollout.shadow.compare import Comparison
from stoker.rollout.state.state import RolloutState
from stoker.rollout.statistics.histogram import aligned, buckets_of, quantile

COPIED, DROPPED, COMPARED = "copied", "dropped", "compared"
DIFFERENT, ROWS, CLASS_CHANGES = "different", "rows", "class_changes"


class ShadowTally:
    """This process' counts of one shadow stage; used by one thread at a time."""

    def __init__(
        self, counts: dict[int, VersionCounts], state: RolloutState, keys: StageKeys
    ) -> None:
        """Create the tally of a stage.

        Args:
            counts: Version -> its counts in the stage, which are increased.
            state: State of the rollout.
            keys: The keys that have already been counted in the stage.
        """
        self._state, self._keys = state, keys
        self._baseline = counts.setdefault(state.baseline, VersionCounts())
        self._candidate = counts.setdefault(state.candidate, VersionCounts())

    def dropped(self, copies: int) -> None:
        """Count requests whose copies were dropped."""
        self._candidate.shadow[COPIED] += copies
        self._candidate.shadow[DROPPED] += copies

    def compared(self, key: int | None, found: Comparison, *, baseline_s: float) -> None:
        """Count both versions' answers to one request.

        Args:
            key: Key of the request; None: the request has no key and always counts.
            found: Comparison of the two answers.
            baseline_s: Time of the baseline's call, seconds.
        """
        self._candidate.shadow[COPIED] += 1
        self._candidate.shadow[COMPARED] += 1
        for counts in (self._baseline, self._candidate):
            counts.requests += 1
        if found.baseline_bad:
            self._baseline.bad += self._keys.is_first(key, Once.BASELINE_BAD)
        if found.bad:
            self._candidate.bad += self._keys.is_first(key, Once.BAD)
        if found.baseline_bad or found.bad:
            return
        shadow = self._candidate.shadow
        shadow[DIFFERENT] += found.is_different
        shadow[ROWS] += found.rows
        shadow[CLASS_CHANGES] += found.class_changes
        for counts, took_s in ((self._baseline, baseline_s), (self._candidate, found.took_s)):
            counts.latency.update(buckets_of(np.array([took_s])).tolist())
        if self._keys.is_first(key, Once.PREDICTED):
            self._baseline.predictions.update(found.baseline)
            self._candidate.predictions.update(found.candidate)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowSummary:
    """The figures of a shadow stage."""

    copied: int
    """Number of requests that were chosen for copying, including those whose copies were dropped."""

    compared: int
    """Number of copies that both versions answered, with or without an error."""

    dropped: int
    """Number of copies that were dropped so that no request had to wait."""

    bad: int
    """Number of copies to which the candidate gave a bad answer."""

    baseline_bad: int
    """Number of copied requests to which the baseline gave a bad answer."""

    different: int
    """Number of copies whose answers differ by more than the tolerance."""

    rows: int
    """Number of rows whose classes were compared."""

    class_changes: int
    """Number of rows whose class differs."""

    distance: float
    """Kolmogorov distance between the predictions of both versions."""

    latency_s: dict[str, tuple[float, float]]
    """Version -> median and 99th percentile of the time in the model, seconds."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {**asdict(self), "latency_s": {key: [*both] for key, both in self.latency_s.items()}}

    def __str__(self) -> str:
        """Return the figures in one line."""
        latency = "; ".join(
            f"version {version} p50 {p50 * 1e3:.3g} ms, p99 {p99 * 1e3:.3g} ms"
            for version, (p50, p99) in self.latency_s.items()
        )
        classes = f", {self.class_changes} of {self.rows} classes changed" if self.rows else ""
        return (
            f"{self.copied} copied, {self.compared} compared, {self.dropped} dropped, {self.bad} bad "
            f"(baseline {self.baseline_bad}), {self.different} different{classes}, "
            f"distance {self.distance:.3f}; {latency or 'no latency yet'}"
        )


def summary(counts: Mapping[int, VersionCounts], state: RolloutState) -> ShadowSummary | None:
    """Return the figures of a shadow stage; None if no request was copied.

    Args:
        counts: Version -> its counts in the stage.
        state: State of the rollout.
    """
    baseline = counts.get(state.baseline, VersionCounts())
    candidate = counts.get(state.candidate, VersionCounts())
    shadow = candidate.shadow
    if not shadow:
        return None
    return ShadowSummary(
        copied=shadow[COPIED],
        compared=shadow[COMPARED],
        dropped=shadow[DROPPED],
        bad=candidate.bad,
        baseline_bad=baseline.bad,
        different=shadow[DIFFERENT],
        rows=shadow[ROWS],
        class_changes=shadow[CLASS_CHANGES],
        distance=_distance(baseline, candidate),
        latency_s={
            str(version): (quantile(each.latency, 0.5), quantile(each.latency, 0.99))
            for version, each in ((state.baseline, baseline), (state.candidate, candidate))
            if each.latency
        },
    )


def _distance(baseline: VersionCounts, candidate: VersionCounts) -> float:
    one, other = aligned(baseline.predictions, candidate.predictions)
    if not one.sum() or not other.sum():
        return 0.0
    return float(np.abs(one.cumsum() / one.sum() - other.cumsum() / other.sum()).max())
