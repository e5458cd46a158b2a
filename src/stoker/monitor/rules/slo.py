"""Burn rates of error budgets: how fast failures use up the number that an objective allows.

Source: Google, Site Reliability Workbook, chapter 5, "Multiwindow, multi-burn-rate alerts".
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from stoker.monitor.rules.objectives import Objective, availabilities, p99s_ms
from stoker.monitor.rules.rule import Alert, Recording, Severity
from stoker.monitor.settings import Slo
from stoker.serve.observability.metrics import LATENCY_BOUNDS_US

WINDOWS = ("5m", "30m", "1h", "6h", "3d")
"""Windows of the recorded ratios. The names of the ratios contain these windows at every time scale."""

SERVER_ERRORS = "UNKNOWN|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS"
"""Statuses that count as errors; a client's mistake, such as INVALID_ARGUMENT, does not."""

LATENCY_BUDGET = 0.01
"""Share of requests that may be slower than `p99_ms`."""

MIN_RATE = 1
"""Requests per second of a model below which no burn rate alerts: a single failure would be a large share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Burn:
    rate: float
    long: str
    short: str
    severity: Severity
    suffix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Promise:
    alert: str
    series: str
    matcher: str
    """Matcher of its models, in braces."""
    budget: float
    """Share of requests that may break the objective."""
    text: str
    objective: str

    def over(self, window: str) -> str:
        """Return the share of requests that breaks it over a window."""
        return f"model:{self.series}:ratio_rate{window}{self.matcher}"


_BURNS = (
    _Burn(rate=14.4, long="1h", short="5m", severity=Severity.PAGE, suffix=""),
    _Burn(rate=6.0, long="6h", short="30m", severity=Severity.PAGE, suffix=""),
    _Burn(rate=1.0, long="3d", short="6h", severity=Severity.TICKET, suffix="Slow"),
)


def recordings(slo: Slo) -> tuple[Recording, ...]:
    """Return rates of requests, shares of failed and of slow requests, by model and window."""
    return tuple(found for window in WINDOWS for found in _of_window(window, slo))


def _of_window(window: str, slo: Slo) -> tuple[Recording, ...]:
    requests = f"model:stoker_requests:rate{window}"
    return (
        Recording(
            record=requests,
            expr=f"sum by (model_name) (rate(stoker_request_count[{window}]))",
        ),
        Recording(
            record=f"model:stoker_request_errors:ratio_rate{window}",
            # A model without errors does not have this series: then the share is 0, not unknown.
            expr=f'(sum by (model_name) (rate(stoker_request_count{{status=~"{SERVER_ERRORS}"}}[{window}]))'
            f" or 0 * {requests}) / {requests}",
        ),
        Recording(
            record=f"model:stoker_request_slow:ratio_rate{window}",
            expr=" or ".join(_slow(objective, window) for objective in p99s_ms(slo)),
        ),
    )


def _slow(objective: Objective, window: str) -> str:
    return (
        f"1 - ({_faster_than(objective, window)})"
        f" / sum by (model_name) (rate(stoker_request_latency_count{objective.braces}[{window}]))"
    )


def _faster_than(objective: Objective, window: str) -> str:
    """The rate of requests below a latency, interpolated inside its bucket like `histogram_quantile`."""
    limit_us = objective.value * 1e3
    bounds = (0.0, *LATENCY_BOUNDS_US)
    below, above = next(pair for pair in pairwise(bounds) if limit_us <= pair[1])
    share = (limit_us - below) / (above - below)

    def rate(bound: float) -> str:
        selector = f"{_of_bound(bound)}{objective.more}"
        return f"sum by (model_name) (rate(stoker_request_latency_bucket{{{selector}}}[{window}]))"

    if below == 0.0:
        return f"{share:.6g} * {rate(above)}"
    return f"{1 - share:.6g} * {rate(below)} + {share:.6g} * {rate(above)}"


def _of_bound(bound: float) -> str:
    """Return the matcher of a bucket: Prometheus 3 stores a whole number as `10.0`, Prometheus 2 as it was written."""
    text = f"{bound:g}"
    return f'le=~"{text}([.]0)?"' if text.isdecimal() else f'le="{text}"'


def alerts(slo: Slo) -> tuple[Alert, ...]:
    """Return the burn rate alerts of both objectives."""
    return tuple(
        found
        for burn in _BURNS
        for found in (
            *(_errors(objective, burn) for objective in availabilities(slo)),
            *(_latency(objective, burn) for objective in p99s_ms(slo)),
        )
    )


def _errors(objective: Objective, burn: _Burn) -> Alert:
    budget = 1.0 - objective.value / 100.0
    return _alert(
        _Promise(
            alert="StokerErrorBudgetBurn",
            series="stoker_request_errors",
            matcher=objective.braces,
            budget=budget,
            text=f"{budget:.3%} of requests may fail",
            objective=f"{objective.value:g}%",
        ),
        burn,
    )


def _latency(objective: Objective, burn: _Burn) -> Alert:
    ms = f"{objective.value:g} ms"
    return _alert(
        _Promise(
            alert="StokerLatencyBudgetBurn",
            series="stoker_request_slow",
            matcher=objective.braces,
            budget=LATENCY_BUDGET,
            text=f"{LATENCY_BUDGET:.0%} of requests may take longer than {ms}",
            objective=ms,
        ),
        burn,
    )


def _alert(promise: _Promise, burn: _Burn) -> Alert:
    limit = f"{burn.rate * promise.budget:.6g}"
    return Alert(
        name=promise.alert + burn.suffix,
        expr=f"{promise.over(burn.long)} > {limit} and {promise.over(burn.short)} > {limit}"
        f" and model:stoker_requests:rate{burn.short} >= {MIN_RATE}",
        severity=burn.severity,
        summary="Model {{ $labels.model_name }} uses up its error budget: {{ $value | humanizePercentage }} of requests",
        description=f"{promise.text}; at this rate the budget of 30 days is gone in {30 / burn.rate:.2g} days. "
        f"Seen over {burn.long} and {burn.short}.",
        labels={"windows": f"{burn.long} {burn.short}", "objective": promise.objective},
        lasts="" if burn.severity is Severity.PAGE else "1h",
        keep="5m" if burn.severity is Severity.PAGE else "1h",
    )
