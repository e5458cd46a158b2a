"""Compares a candidate's answer in shadow with the baseline's: could clients use it, and is it equal?"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from stoker.rollout.statistics.histogram import count
from stoker.rollout.statistics.prediction_shift import predicted

Outputs = Mapping[str, NDArray[Any]]
"""Output name -> array."""

Shapes = Mapping[str, tuple[int | None, ...] | None]
"""Output name -> declared shape; None for any shape. A dimension of any size is None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Comparison of two versions' answers to one request."""

    baseline_bad: bool = False
    """Whether the baseline failed, or gave a value that is not finite."""

    bad: str = ""
    """What is wrong with the candidate's answer; empty if it is usable."""

    is_different: bool = False
    """Whether an output differs by more than the tolerance."""

    rows: int = 0
    """Number of rows whose classes were compared."""

    class_changes: int = 0
    """Number of rows whose class differs."""

    baseline: Counter[int] = field(default_factory=Counter)
    """Bucket of the predicted number or class -> number of the baseline's predictions."""

    candidate: Counter[int] = field(default_factory=Counter)
    """Bucket of the predicted number or class -> number of the candidate's predictions."""

    took_s: float = 0.0
    """Time of the candidate's call, seconds."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a JSON object."""
        return {
            **asdict(self),
            "baseline": sorted(self.baseline.items()),
            "candidate": sorted(self.candidate.items()),
        }


def comparison_of(content: Mapping[str, Any]) -> Comparison:
    """Parse the result of `to_json`."""
    counted = {
        name: Counter({int(bucket): int(times) for bucket, times in content[name]})
        for name in ("baseline", "candidate")
    }
    return Comparison(**{**content, **counted})


def compare(
    baseline: Outputs | None, candidate: Outputs, *, tolerance: float, declared: Shapes
) -> Comparison:
    """Compare a candidate's answer with the baseline's.

    Args:
        baseline: Outputs of the baseline; None if the baseline failed.
        candidate: Outputs of the candidate.
        tolerance: Numbers are equal when they differ by at most this times the larger of 1 and the baseline's number.
        declared: Output shapes that clients of the baseline may rely on.
    """
    mine = predicted(candidate)
    bad = _unusable(baseline, candidate, declared)
    if mine is not None and not np.isfinite(mine).all():
        bad = "a value is not finite"
    theirs = None if baseline is None else predicted(baseline)
    is_finite = theirs is None or bool(np.isfinite(theirs).all())
    if baseline is None or not is_finite or bad:
        return Comparison(baseline_bad=baseline is None or not is_finite, bad=bad)
    changes, rows = _class_changes(baseline, candidate)
    return Comparison(
        is_different=any(
            not _equal(value, candidate[name], tolerance) for name, value in baseline.items()
        ),
        rows=rows,
        class_changes=changes,
        baseline=Counter() if theirs is None else count(theirs),
        candidate=Counter() if mine is None else count(mine),
    )


def _unusable(baseline: Outputs | None, candidate: Outputs, declared: Shapes) -> str:
    """Return what clients of the baseline could not read in an answer; empty if they can read all of it."""
    for name in sorted(declared.keys() - candidate.keys()):
        return f"no output {name!r}"
    for name, value in sorted(candidate.items()):
        shape = declared.get(name)
        if shape is not None and not _fits(value.shape, shape):
            wanted = ", ".join("?" if size is None else str(size) for size in shape)
            return f"output {name!r} has the shape {list(value.shape)}, not [{wanted}]"
    for name, value in sorted((baseline or {}).items()):
        if name not in candidate:
            return f"no output {name!r}"
        if (kind := candidate[name].dtype) != value.dtype:
            return f"output {name!r} is {kind.name}, not {value.dtype.name}"
        if candidate[name].ndim != value.ndim:
            return f"output {name!r} has {candidate[name].ndim} dimensions, not {value.ndim}"
    return ""


def _fits(shape: tuple[int, ...], declared: tuple[int | None, ...]) -> bool:
    return len(shape) == len(declared) and all(
        wanted is None or size == wanted for size, wanted in zip(shape, declared, strict=True)
    )


def _equal(baseline: NDArray[Any], candidate: NDArray[Any], tolerance: float) -> bool:
    if baseline.shape != candidate.shape:
        return False
    if baseline.dtype.kind != "f":
        return bool(np.array_equal(baseline, candidate))
    size = np.maximum(np.abs(baseline.astype(np.float64)), 1.0)
    with np.errstate(invalid="ignore"):  # infinity minus infinity in an output
        near = np.abs(candidate.astype(np.float64) - baseline) <= tolerance * size
    same = (baseline == candidate) | (np.isnan(baseline) & np.isnan(candidate))
    return bool((near | same).all())


def _class_changes(baseline: Outputs, candidate: Outputs) -> tuple[int, int]:
    """Return two numbers for the first output with classes: rows whose class differs, and rows that have a class."""
    for name in sorted(baseline):
        before, now = _classes(baseline[name]), _classes(candidate[name])
        if before is not None and now is not None and len(before) == len(now):
            return int((before != now).sum()), len(before)
    return 0, 0


def _classes(values: NDArray[Any]) -> NDArray[Any] | None:
    """Return each row's class, [rows] (label, or index of the largest number); None if the output has no classes."""
    if values.ndim not in (1, 2) or not values.size:
        return None
    several = values.ndim == 2 and values.shape[1] > 1
    if values.dtype.kind == "f":
        return values.argmax(1) if several else None
    return None if several else values.reshape(-1)


def failed(baseline: Outputs | None, reason: str) -> Comparison:
    """Return the comparison for a candidate that did not answer."""
    theirs = None if baseline is None else predicted(baseline)
    is_bad = baseline is None or (theirs is not None and any(map(math.isnan, theirs)))
    return Comparison(baseline_bad=is_bad, bad=reason)
