"""Gates: limits on metrics. An undefined metric fails its gate."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stoker.evaluate.config import EvaluateConfig, Gate, SliceGate
from stoker.evaluate.metrics import MetricValue, Undefined, better_direction


@dataclass(frozen=True, kw_only=True, slots=True)
class BaselineMetrics:
    """Metrics of the version in the repository, measured on the same rows."""

    version: str
    """Name of the version in messages, e.g. `version 3`."""

    rows: int = 0
    """Number of rows."""

    metrics: Mapping[str, MetricValue] = field(default_factory=dict)
    """Metric -> value."""

    error: str = ""
    """Why the evaluation of this version failed; "" if it did not fail."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceResult:
    """One slice's metrics."""

    column: str
    """The raw column, or a cross of columns."""

    value: str
    """The value that its rows share, as printed."""

    rows: int
    """Number of rows."""

    metrics: Mapping[str, MetricValue]
    """The same metrics as for the whole split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Result of one limit."""

    key: str
    """The setting, e.g. `evaluate.gates.auc.min`."""

    subject: str
    """The metric, and the slice if there is one."""

    rule: str
    """The limit as text, e.g. `at least 0.8`."""

    passed: bool
    """Whether the limit holds."""

    reason: str
    """The measured value, as text."""


def check_gates(
    config: EvaluateConfig,
    *,
    rows: int,
    metrics: Mapping[str, MetricValue],
    slices: Sequence[SliceResult] = (),
    baseline: BaselineMetrics | None = None,
) -> list[Verdict]:
    """Check the metrics against every gate.

    Args:
        config: The gates.
        rows: Rows of the eval split.
        metrics: Metrics of the whole split; a missing one fails its gate.
        slices: Metrics by slice; a missing slice fails its gate.
        baseline: Metrics of the version in the repository; None if no version was pushed.

    Returns:
        One verdict per limit, in the order of the configuration.
    """
    verdicts: list[Verdict] = []
    for name, gate in config.gates.items():
        value = metrics.get(name, Undefined(reason="it was not computed"))
        if not rows:
            value = Undefined(reason="the eval split is empty")
        key = f"evaluate.gates.{name}"
        verdicts += _limits(key, gate, subject=name, value=value)
        if gate.max_drop is not None:
            verdicts.append(
                _drop(key, gate.max_drop, name=name, value=value, rows=rows, baseline=baseline)
            )
    for name, slice_gate in config.slice_gates.items():
        for column in slice_gate.slices:
            pieces = [piece for piece in slices if piece.column == column]
            verdicts += _slice_verdicts(name, slice_gate, column=column, pieces=pieces)
    return verdicts


def _limits(
    key: str, gate: Gate | SliceGate, *, subject: str, value: MetricValue
) -> Iterator[Verdict]:
    if gate.min is not None:
        yield _limit(f"{key}.min", gate.min, subject=subject, value=value, above=True)
    if gate.max is not None:
        yield _limit(f"{key}.max", gate.max, subject=subject, value=value, above=False)


def _limit(key: str, bound: float, *, subject: str, value: MetricValue, above: bool) -> Verdict:
    rule = f"{'at least' if above else 'at most'} {bound:g}"
    number = _finite(value)
    if isinstance(number, Undefined):
        return _failed(key, subject, rule=rule, reason=f"undefined: {number.reason}")
    passed = number >= bound if above else number <= bound
    return Verdict(key=key, subject=subject, rule=rule, passed=passed, reason=_shown(number, bound))


def _drop(
    key: str,
    max_drop: float,
    *,
    name: str,
    value: MetricValue,
    rows: int,
    baseline: BaselineMetrics | None,
) -> Verdict:
    key = f"{key}.max_drop"
    against = baseline.version if baseline else "the version in the repository"
    rule = f"at most {max_drop:g} worse than {against}"
    new = _finite(value)
    if isinstance(new, Undefined):
        return _failed(key, name, rule=rule, reason=f"undefined: {new.reason}")
    if baseline is None:
        reason = "no baseline yet: nothing has been pushed, so only the other limits apply"
        return Verdict(key=key, subject=name, rule=rule, passed=True, reason=reason)
    old = _baseline_value(name, baseline, rows)
    if isinstance(old, Undefined):
        return _failed(key, name, rule=rule, reason=old.reason)
    drop = new - old if better_direction(name) == "lower" else old - new
    rounding = _ROUNDINGS * sys.float_info.epsilon * max(abs(new), abs(old))
    reason = f"{_shown(new, old)}, {baseline.version} has {_shown(old, new)}: {_change(drop)}"
    passed = drop <= max_drop + rounding
    return Verdict(key=key, subject=name, rule=rule, passed=passed, reason=reason)


_ROUNDINGS = 4
"""Allowed rounding error of the difference of two metrics, in units of the last place: in binary, 0.95 - 0.945
is above 0.005, but must pass a `max_drop` of 0.005."""


def _baseline_value(name: str, baseline: BaselineMetrics, rows: int) -> MetricValue:
    who = baseline.version
    if baseline.error:
        return Undefined(reason=f"{who} could not be evaluated: {baseline.error}")
    if baseline.rows != rows:
        return Undefined(reason=f"{who} was measured on {baseline.rows} rows, this model on {rows}")
    value = _finite(baseline.metrics.get(name, Undefined(reason="it was not computed")))
    if isinstance(value, Undefined):
        return Undefined(reason=f"undefined for {who}: {value.reason}")
    return value


def _slice_verdicts(
    name: str, gate: SliceGate, *, column: str, pieces: Sequence[SliceResult]
) -> Iterator[Verdict]:
    key = f"evaluate.slice_gates.{name}"
    found = {piece.value: piece for piece in pieces}
    wanted = gate.values or tuple(found)
    if not wanted:
        rule = f"at least {gate.min_rows} rows"
        yield _failed(f"{key}.slices", f"{name} by {column}", rule=rule, reason="it has no slices")
    for value in wanted:
        rows = found[value].rows if value in found else 0
        subject = f"{name} where {column} is {value}"
        if rows < gate.min_rows:
            rule = f"at least {gate.min_rows} rows"
            yield _failed(f"{key}.min_rows", subject, rule=rule, reason=f"{rows} rows")
            continue
        missing = Undefined(reason="it was not computed")
        measured = found[value].metrics.get(name, missing)
        yield from _limits(key, gate, subject=subject, value=measured)


def _finite(value: MetricValue) -> MetricValue:
    if isinstance(value, Undefined) or math.isfinite(value):
        return value
    return Undefined(reason=f"it is {value}")


def _failed(key: str, subject: str, *, rule: str, reason: str) -> Verdict:
    return Verdict(key=key, subject=subject, rule=rule, passed=False, reason=reason)


def _shown(number: float, other: float) -> str:
    """A number with five digits, or with all digits if five would make it look equal to `other`."""
    short = f"{number:.5g}"
    return short if number == other or short != f"{other:.5g}" else repr(number)


def _change(drop: float) -> str:
    if drop == 0:
        return "no change"
    return f"{abs(drop):.3g} {'worse' if drop > 0 else 'better'}"
