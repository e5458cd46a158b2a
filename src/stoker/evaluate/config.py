"""The section `evaluate:` of stoker.yaml."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from stoker.core.config import nearest
from stoker.core.errors import ConfigError, Plain
from stoker.core.multi_output import of_output
from stoker.evaluate.metrics import METRICS, better_direction, metrics_of, of_label, without_label
from stoker.evaluate.slices import columns_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Gate:
    """Limits of a metric on the whole eval split; at least one is set."""

    min: float | None = None
    """Minimum value that passes."""

    max: float | None = None
    """Maximum value that passes."""

    max_drop: float | None = None
    """How much worse than the version in the repository the metric may be, on the same rows, in its
    own unit and direction (for a loss: how much higher)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SliceGate:
    """Limits of a metric in every slice of some columns."""

    slices: tuple[str, ...]
    """Raw columns, or crosses like `day*payment_type`, whose slices are checked."""

    values: tuple[str, ...] = ()
    """Only these slices, as printed in the report; by default all. A value without rows fails, as
    does every slice with fewer rows than `min_rows`."""

    min: float | None = None
    """Minimum value that passes."""

    max: float | None = None
    """Maximum value that passes."""

    min_rows: int = 100
    """Minimum number of rows of a slice; a slice with fewer fails."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateConfig:
    """Metrics on the eval split, and the limits that a model must keep to be pushed."""

    metrics: tuple[str, ...] = ()
    """Names of metrics (default: those of the task). Metrics of gates are added. If the model has several
    outputs, a name is `OUTPUT_METRIC`. A metric of one of several labels per row is `label_N_METRIC`, N from
    0. Gates use the same names."""

    slices: tuple[str, ...] = ()
    """Raw columns: metrics are also reported for each of their values; `a*b` crosses two or more columns."""

    gates: dict[str, Gate] = field(default_factory=dict)
    """Metric -> its limits on the whole split."""

    slice_gates: dict[str, SliceGate] = field(default_factory=dict)
    """Metric -> its limits in each slice."""

    def __post_init__(self) -> None:
        for name in self.metrics:
            _require_metric("evaluate.metrics", name)
        for name, gate in self.gates.items():
            _check_gate(name, gate)
        for name, slice_gate in self.slice_gates.items():
            _check_slice_gate(name, slice_gate)

    @property
    def all_slices(self) -> tuple[str, ...]:
        """The names of all slices that are reported or have a gate, without duplicates."""
        gated = (name for gate in self.slice_gates.values() for name in gate.slices)
        return tuple(dict.fromkeys([*self.slices, *gated]))


def slice_columns(config: EvaluateConfig, columns: Sequence[str]) -> tuple[str, ...]:
    """The raw columns that the slices need.

    Args:
        config: The slices.
        columns: Names of all raw columns.

    Raises:
        ConfigError: a slice names an unknown column; the error names the nearest.
    """
    needed: dict[str, None] = {}
    for name in config.all_slices:
        for column in columns_of(name, columns):
            if column not in columns:
                raise ConfigError(
                    "evaluate.slices must name raw columns",
                    got=column,
                    fix=nearest(column, columns),
                )
            needed[column] = None
    return tuple(needed)


def require_metrics_of(
    config: EvaluateConfig, outputs: Sequence[str], *, any_label: bool = False
) -> None:
    """Raise an error for a metric that no output of the model has.

    Args:
        config: The metrics and gates.
        outputs: Names of the outputs with a label.
        any_label: Accept the metrics of any label of an output: the number of labels is not known yet.

    Raises:
        ConfigError: no output has the metric; the error names the nearest.
    """
    known = metrics_of(outputs)
    settings = {
        "evaluate.metrics": config.metrics,
        "evaluate.gates": config.gates,
        "evaluate.slice_gates": config.slice_gates,
    }
    for key, names in settings.items():
        for name in names:
            whole = without_label(name) if any_label else name
            if name not in known and whole not in known:
                several = " of one of the model's outputs, OUTPUT_METRIC" * (len(outputs) > 1)
                raise ConfigError(
                    f"{key} must name a metric{several}", got=name, fix=nearest(name, known)
                )


def outputs_and_labels(shapes: Mapping[str, Sequence[int | None]]) -> list[str]:
    """The names of all outputs, and of each label of outputs with several labels per row.

    Args:
        shapes: Output -> shape of its label, without the batch axis.
    """
    found = list(shapes)
    for output, shape in shapes.items():
        if len(shape) == 1 and (shape[0] or 0) > 1:
            found += [of_output(output, of_label(label)) for label in range(shape[0] or 0)]
    return found


def _require_metric(key: str, name: str) -> None:
    if better_direction(name) is None:
        raise ConfigError(
            f"{key} must name one of: {', '.join(METRICS)}", got=name, fix=nearest(name, METRICS)
        )


def _check_gate(name: str, gate: Gate) -> None:
    key = f"evaluate.gates.{name}"
    _require_metric("evaluate.gates", name)
    if gate.min is None and gate.max is None and gate.max_drop is None:
        raise ConfigError(
            f"{key} must set at least one of min, max and max_drop",
            got=Plain("none of them"),
            fix=f"Write for example `{name}: {{min: 0.9, max_drop: 0.01}}`.",
        )
    _check_limits(key, gate.min, gate.max)
    if gate.max_drop is not None:
        _check_drop(f"{key}.max_drop", name, gate.max_drop)


def _check_drop(key: str, name: str, max_drop: float) -> None:
    _require_number(key, max_drop)
    if max_drop < 0:
        raise ConfigError(
            f"{key} must be at least 0",
            got=max_drop,
            fix="Write how much worse the metric may become, as a positive number.",
        )
    if better_direction(name) == "neither":
        raise ConfigError(
            f"{key} needs a metric for which either higher or lower is better",
            got=name,
            fix="Give it min and max instead.",
        )


def _check_slice_gate(name: str, gate: SliceGate) -> None:
    key = f"evaluate.slice_gates.{name}"
    _require_metric("evaluate.slice_gates", name)
    if not gate.slices:
        raise ConfigError(
            f"{key}.slices must name at least one raw column",
            got=gate.slices,
            fix=f"Write for example `{name}: {{slices: [country], min: 0.6, min_rows: 200}}`.",
        )
    if gate.min is None and gate.max is None:
        raise ConfigError(
            f"{key} must set min, max or both",
            got=Plain("neither"),
            fix=f"Write for example `{name}: {{slices: [...], min: 0.6}}`.",
        )
    _check_limits(key, gate.min, gate.max)
    if gate.min_rows < 1:
        raise ConfigError(
            f"{key}.min_rows must be at least 1",
            got=gate.min_rows,
            fix="Set it to the minimum number of rows for a meaningful metric.",
        )


def _check_limits(key: str, low: float | None, high: float | None) -> None:
    if low is not None:
        _require_number(f"{key}.min", low)
    if high is not None:
        _require_number(f"{key}.max", high)
    if low is not None and high is not None and low > high:
        raise ConfigError(
            f"{key}.min must not be above {key}.max",
            got=Plain(f"min {low}, max {high}"),
            fix="Swap the two numbers, or leave one out.",
        )


def _require_number(key: str, value: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value):
        raise ConfigError(
            f"{key} must be a finite number", got=value, fix="Write a number, or leave the key out."
        )
