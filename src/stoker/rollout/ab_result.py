"""The result of an A/B test, from its logs: per arm keys, mean, and an interval of the difference."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.rollout.ab_settings import ABTestSettings, Metric
from stoker.rollout.ab_test import ArmTotals, Difference, difference, log_share_evidence
from stoker.rollout.append_log import LogReader

SHARES_ALPHA = 0.01
"""Probability that a test whose arms get the keys that the weights say ever warns of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmResult:
    """One arm of a test."""

    version: int
    """The version of the model."""

    share: float
    """Share of the keys that the weights say."""

    totals: ArmTotals
    """The outcomes of its keys."""

    reported: int
    """Keys with an outcome, also of 0."""

    difference: Difference | None
    """To the baseline; None: too early, or it is the baseline."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ABResult:
    """The result of a test as it stands now."""

    arms: list[ArmResult]
    """In the order of the test."""

    warnings: list[str]
    """Why the result may be wrong, a sentence each."""


def result_of(folder: Path, test: ABTestSettings, *, shares: Mapping[int, float]) -> ABResult:
    """Read the logs of a test, and compare each arm with the baseline.

    Args:
        folder: of the test's logs.
        test: its settings.
        shares: share of the keys that the split gives to each arm.
    """
    keys, arms, left_out = _assignments(folder)
    values, has_outcome, without_key, cut = _values(folder, keys, test.metric)
    totals, reported = {}, {}
    for version in test.shares:
        mine = values[arms == version]
        totals[version] = ArmTotals(
            keys=len(mine),
            total=float(mine.sum()),
            squares=float((mine**2).sum()),
            nonzero=int(np.count_nonzero(mine)),
        )
        reported[version] = int(has_outcome[arms == version].sum())
    found = [
        ArmResult(
            version=version,
            share=share,
            totals=totals[version],
            reported=reported[version],
            difference=None
            if version == test.baseline
            else difference(
                totals[test.baseline],
                totals[version],
                comparisons=len(test.arms) - 1,
                bounded=test.bounded,
                alpha=test.alpha,
            ),
        )
        for version, share in test.arms
    ]
    warnings = _share_warning(found, shares)
    if len(keys) >= test.max_keys:
        warnings.append(f"The log is full: keys after the first {test.max_keys:,} do not count.")
    if without_key:
        warnings.append(
            f"{without_key:,} outcomes are of keys whose assignment is not in the logs."
        )
    if left_out + cut:
        warnings.append(f"{left_out + cut:,} lines of the logs are cut or damaged, and left out.")
    return ABResult(arms=found, warnings=warnings)


def _share_warning(arms: list[ArmResult], shares: Mapping[int, float]) -> list[str]:
    keys = [arm.totals.keys for arm in arms]
    evidence = log_share_evidence(keys, [shares[arm.version] for arm in arms])
    if evidence < math.log(1.0 / SHARES_ALPHA):
        return []
    seen = ", ".join(
        f"version {arm.version} {count / sum(keys):.2%} instead of {arm.share:.2%}"
        for arm, count in zip(arms, keys, strict=True)
    )
    warning = (
        f"The arms do not have the keys that the weights say ({seen}), so the difference may come from who is "
        "missing: find out why, an arm that cannot be loaded for example, and begin another test."
    )
    return [warning]


def _columns(
    reader: LogReader, name: str, kind: str
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Time, key and another field of all lines that have them; the order of the same key is that of time."""
    times, keys, others = array("d"), array("Q"), array(kind)
    for line in reader.read():
        try:
            at, key, other = float(line["at"]), int(line["key"], 16), line[name]
            others.append(other)
        except (KeyError, TypeError, ValueError, OverflowError):
            continue
        times.append(at)
        keys.append(key)
    at_s, hashes = np.array(times), np.array(keys, dtype=np.uint64)
    order = np.lexsort((at_s, hashes))
    return at_s[order], hashes[order], np.array(others)[order]


def _assignments(folder: Path) -> tuple[NDArray[np.uint64], NDArray[np.int64], int]:
    """Keys in order, the arm that each was first assigned to, and how many lines were left out."""
    reader = LogReader(folder, "assignments-*")
    _, keys, arms = _columns(reader, "arm", "q")
    first = _is_first(keys)
    return keys[first], arms[first], reader.left_out


def _values(
    folder: Path, keys: NDArray[np.uint64], metric: Metric
) -> tuple[NDArray[np.float64], NDArray[np.bool_], int, int]:
    """Value of each key, whether it has an outcome; outcomes of other keys, and lines that were left out."""
    reader = LogReader(folder, "outcomes-*")
    _, of, values = _columns(reader, "value", "d")
    if metric is Metric.FIRST:
        first = _is_first(of)
        of, values = of[first], values[first]
    found, has_outcome = np.zeros(len(keys)), np.zeros(len(keys), dtype=bool)
    if not len(keys):
        return found, has_outcome, len(of), reader.left_out
    at = np.minimum(np.searchsorted(keys, of), len(keys) - 1)
    known = keys[at] == of
    np.add.at(found, at[known], values[known])
    has_outcome[at[known]] = True
    return found, has_outcome, int((~known).sum()), reader.left_out


def _is_first(keys: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """Whether each is the first of its kind, in an array that is in order."""
    first = np.ones(len(keys), dtype=bool)
    first[1:] = keys[1:] != keys[:-1]
    return first
