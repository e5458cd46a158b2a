"""Recording rules and alerts about burn rates: how fast failures use up the error budget that an objective allows.

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
"""Windows of the recorded ratios. The names of the series contain these windows, whatever the time scale is."""

SERVER_ERRORS = "UNKNOWN|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS"
"""Pattern of the statuses that count as errors. An error of a client, such as INVALID_ARGUMENT, does not count."""

LATENCY_BUDGET = 0.01
"""Share of requests that may be slower than `p99_ms`."""

MIN_RATE = 1
"""Minimum requests per second of a model for alerts about burn rates: below, a single failure is a large share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Burn:
    rate: float
    long: str
    short: str
    severity: Severity
    suffix: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _ErrorBudget:
    alert: str
    series: str
    matcher: str
    """PromQL matcher of its models, in braces."""
    share: float
    """Share of requests that may miss the objective."""
    text: str
    objective: str

    def over(self, window: str) -> str:
        """Return PromQL for the share of requests that missed the objective over a window."""
        return f"model:{self.series}:ratio_rate{window}{self.matcher}"


_BURNS = (
    _Burn(rate=14.4, long="1h", short="5m", severity=Severity.PAGE, suffix=""),
    _Burn(rate=6.0, long="6h", short="30m", severity=Severity.PAGE, suffix=""),
    _Burn(rate=1.0, long="3d", short="6h", severity=Severity.TICKET, suffix="Slow"),
)


def recordings(slo: Slo) -> tuple[Recording, ...]:
    """Return the rules that record the request rate and the shares of failed and slow requests, by model and window."""
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
            # A model without errors has no series with these statuses; `or 0 * ...` makes its share 0 instead of
            # unknown.
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
    """Return PromQL for the rate of requests faster than the objective.

    Inside a bucket it interpolates, like `histogram_quantile`.
    """
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
    """Return the matcher of a bucket's bound: Prometheus 3 stores a whole number as `10.0`, Prometheus 2 unchanged."""
    text = f"{bound:g}"
    return f'le=~"{text}([.]0)?"' if text.isdecimal() else f'le="{text}"'


def alerts(slo: Slo) -> tuple[Alert, ...]:
    """Return the alerts about burn rates of both kinds of objectives."""
    return tuple(
        found
        for burn in _BURNS
        for found in (
            *(_errors(objective, burn) for objective in availabilities(slo)),
            *(_latency(objective, burn) for objective in p99s_ms(slo)),
        )
    )


def _errors(objective: Objective, burn: _Burn) -> Alert:
    share = 1.0 - objective.value / 100.0
    return _alert(
        _ErrorBudget(
            alert="StokerErrorBudgetBurn",
            series="stoker_request_errors",
            matcher=objective.braces,
            share=share,
            text=f"{share:.3%} of requests may fail",
            objective=f"{objective.value:g}%",
        ),
        burn,
    )


def _latency(objective: Objective, burn: _Burn) -> Alert:
    ms = f"{objective.value:g} ms"
    return _alert(
        _ErrorBudget(
            alert="StokerLatencyBudgetBurn",
            series="stoker_request_slow",
            matcher=objective.braces,
            share=LATENCY_BUDGET,
            text=f"{LATENCY_BUDGET:.0%} of requests may take longer than {ms}",
            objective=ms,
        ),
        burn,
    )


def _alert(budget: _ErrorBudget, burn: _Burn) -> Alert:
    limit = f"{burn.rate * budget.share:.6g}"
    return Alert(
        name=budget.alert + burn.suffix,
        expr=f"{budget.over(burn.long)} > {limit} and {budget.over(burn.short)} > {limit}"
        f" and model:stoker_requests:rate{burn.short} >= {MIN_RATE}",
        severity=burn.severity,
        summary="Model {{ $labels.model_name }} uses up its error budget: {{ $value | humanizePercentage }} of requests",
        description=f"{budget.text}; at this rate the budget of 30 days is used up in {30 / burn.rate:.2g} days. "
        f"Measured over {burn.long} and {burn.short}.",
        labels={"windows": f"{burn.long} {burn.short}", "objective": budget.objective},
        lasts="" if burn.severity is Severity.PAGE else "1h",
        keep="5m" if burn.severity is Severity.PAGE else "1h",
    )
