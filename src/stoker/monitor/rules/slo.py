"""Burn rates of error budgets: how fast the failures that an objective allows are used up.

Source: Google, Site Reliability Workbook, chapter 5, "Multiwindow, multi-burn-rate alerts".
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from stoker.monitor.rules.rule import Alert, Recording, Severity
from stoker.monitor.settings import Slo
from stoker.serve.observability.metrics import LATENCY_BOUNDS_US

WINDOWS = ("5m", "30m", "1h", "6h", "3d")
"""Of the recorded ratios. Their names keep these windows at every scale of time."""

SERVER_ERRORS = "UNKNOWN|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED|UNIMPLEMENTED|INTERNAL|UNAVAILABLE|DATA_LOSS"
"""Statuses that count; a mistake of the client, such as INVALID_ARGUMENT, does not."""

LATENCY_BUDGET = 0.01
"""Share of requests that may be slower than `p99_ms`."""

LEAST_RATE = 1
"""Requests per second of a model below which no burn rate alerts: a single failure would be a large share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Burn:
    rate: float
    long: str
    short: str
    severity: Severity
    suffix: str


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
            # A model without errors has no such series: then the share is 0, not unknown.
            expr=f'(sum by (model_name) (rate(stoker_request_count{{status=~"{SERVER_ERRORS}"}}[{window}]))'
            f" or 0 * {requests}) / {requests}",
        ),
        Recording(
            record=f"model:stoker_request_slow:ratio_rate{window}",
            expr=f"1 - ({_faster_than(slo.p99_ms * 1e3, window)})"
            f" / sum by (model_name) (rate(stoker_request_latency_count[{window}]))",
        ),
    )


def _faster_than(limit_us: float, window: str) -> str:
    """The rate of requests below a latency, interpolated inside of its bucket as `histogram_quantile` does."""
    bounds = (0.0, *LATENCY_BOUNDS_US)
    below, above = next(pair for pair in pairwise(bounds) if limit_us <= pair[1])
    share = (limit_us - below) / (above - below)

    def rate(bound: float) -> str:
        return (
            f'sum by (model_name) (rate(stoker_request_latency_bucket{{le="{bound:g}"}}[{window}]))'
        )

    if below == 0.0:
        return f"{share:.6g} * {rate(above)}"
    return f"{1 - share:.6g} * {rate(below)} + {share:.6g} * {rate(above)}"


def alerts(slo: Slo) -> tuple[Alert, ...]:
    """Return the burn rate alerts of both objectives."""
    budget = 1.0 - slo.availability / 100.0
    failing = f"{budget:.3%} of requests may fail"
    late = f"{LATENCY_BUDGET:.0%} of requests may take longer than {slo.p99_ms:g} ms"
    return tuple(
        found
        for burn in _BURNS
        for found in (
            _alert("StokerErrorBudgetBurn", "stoker_request_errors", budget, failing, burn),
            _alert("StokerLatencyBudgetBurn", "stoker_request_slow", LATENCY_BUDGET, late, burn),
        )
    )


def _alert(name: str, what: str, budget: float, promise: str, burn: _Burn) -> Alert:
    limit = f"{burn.rate * budget:.6g}"
    ratio = f"model:{what}:ratio_rate"
    return Alert(
        name=name + burn.suffix,
        expr=f"{ratio}{burn.long} > {limit} and {ratio}{burn.short} > {limit}"
        f" and model:stoker_requests:rate{burn.short} >= {LEAST_RATE}",
        severity=burn.severity,
        summary="Model {{ $labels.model_name }} uses up its error budget: {{ $value | humanizePercentage }} of requests",
        description=f"{promise}; at this rate the budget of 30 days is gone in {30 / burn.rate:.2g} days. "
        f"Seen over {burn.long} and {burn.short}.",
        labels={"windows": f"{burn.long} {burn.short}"},
        lasts="" if burn.severity is Severity.PAGE else "1h",
        keep="5m" if burn.severity is Severity.PAGE else "1h",
    )
