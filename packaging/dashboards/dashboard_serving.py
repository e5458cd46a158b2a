"""The dashboard of servers."""

from __future__ import annotations

from dashboard_parts import Dashboard, Panel, Query, Row, Variable

_MODEL = 'model_name=~"$model"'
_VERSION = f'{_MODEL},version=~"$version"'


def _of(expr: str, legend: str = "{{model_name}}") -> tuple[Query, ...]:
    return (Query(expr=expr, legend=legend),)


SERVING = Dashboard(
    uid="stoker-serving",
    title="Stoker: serving",
    help="Do clients get correct answers in time, and at what cost?",
    variables=(
        Variable(
            name="model", label="Model", query="label_values(stoker_request_count, model_name)"
        ),
        Variable(
            name="version",
            label="Version",
            query='label_values(stoker_request_count{model_name=~"$model"}, version)',
        ),
    ),
    rows=(
        Row(
            title="Now",
            stats=(
                Panel(
                    title="Requests",
                    queries=_of(f"model:stoker_requests:rate5m{{{_MODEL}}}"),
                    unit="reqps",
                    help="Per second, by model.",
                ),
                Panel(
                    title="Errors",
                    queries=_of(f"model:stoker_request_errors:ratio_rate5m{{{_MODEL}}}"),
                    unit="percentunit",
                    alert="StokerErrorBudgetBurn",
                    help="Share that failed because of the server.",
                ),
                Panel(
                    title="Too slow",
                    queries=_of(f"model:stoker_request_slow:ratio_rate5m{{{_MODEL}}}"),
                    unit="percentunit",
                    limit=0.01,
                    alert="StokerLatencyBudgetBurn",
                    help="Share that took longer than slo.p99_ms; 1 % is allowed.",
                ),
                Panel(
                    title="99th percentile",
                    queries=_of(f"model:stoker_request_latency_seconds:p99_5m{{{_MODEL}}}"),
                    unit="s",
                    alert="StokerLatencyBudgetBurn",
                    help="Time of successful requests.",
                ),
                Panel(
                    title="Models loaded",
                    queries=_of(f"count(stoker_model_loaded{{{_VERSION}}} > 0)", "loaded"),
                    unit="short",
                    alert="StokerModelNotLoaded",
                    help="Versions, over all servers.",
                ),
            ),
        ),
        Row(
            title="Requests",
            lines=(
                Panel(
                    title="Requests by version",
                    queries=_of(
                        f"sum by (model_name, version) (rate(stoker_request_count{{{_VERSION}}}[$__rate_interval]))",
                        "{{model_name}} {{version}}",
                    ),
                    unit="reqps",
                    help="Per second.",
                ),
                Panel(
                    title="Failed requests by status",
                    queries=_of(
                        f'sum by (model_name, status) (rate(stoker_request_count{{{_VERSION},status!="OK"}}[$__rate_interval]))',
                        "{{model_name}} {{status}}",
                    ),
                    unit="reqps",
                    alert="StokerErrorBudgetBurn",
                    help="INVALID_ARGUMENT and NOT_FOUND are the client's.",
                ),
                Panel(
                    title="Latency",
                    queries=(
                        Query(
                            expr=f"model:stoker_request_latency_seconds:p50_5m{{{_MODEL}}}",
                            legend="{{model_name}} p50",
                        ),
                        Query(
                            expr=f"model:stoker_request_latency_seconds:p99_5m{{{_MODEL}}}",
                            legend="{{model_name}} p99",
                        ),
                    ),
                    unit="s",
                    alert="StokerLatencyBudgetBurn",
                    help="Median and 99th percentile of 5 minutes.",
                ),
                Panel(
                    title="Error budget: burn rate inputs",
                    queries=(
                        Query(
                            expr=f"model:stoker_request_errors:ratio_rate1h{{{_MODEL}}}",
                            legend="{{model_name}} 1h",
                        ),
                        Query(
                            expr=f"model:stoker_request_errors:ratio_rate6h{{{_MODEL}}}",
                            legend="{{model_name}} 6h",
                        ),
                        Query(
                            expr=f"model:stoker_request_errors:ratio_rate3d{{{_MODEL}}}",
                            legend="{{model_name}} 3d",
                        ),
                    ),
                    unit="percentunit",
                    alert="StokerErrorBudgetBurnSlow",
                    help="Shares of failed requests that the alerts compare with the objective.",
                ),
            ),
        ),
        Row(
            title="Batches and queues",
            lines=(
                Panel(
                    title="Time in the queue",
                    queries=(
                        Query(
                            expr=f"model:stoker_queue_wait_seconds:avg5m{{{_MODEL}}}",
                            legend="{{model_name}}",
                        ),
                        Query(
                            expr=f"model:stoker_thread_wait_seconds:avg5m{{{_MODEL}}}",
                            legend="{{model_name}}: for a thread",
                        ),
                    ),
                    unit="s",
                    alert="StokerQueueGrowing",
                    help="Waiting requests, divided by requests per second; those without a thread count by model as all do.",
                ),
                Panel(
                    title="Rows of a batch",
                    queries=_of(
                        "sum(rate(:tensorflow:serving:batching_session:processed_batch_size_sum[$__rate_interval]))"
                        " / sum(rate(:tensorflow:serving:batching_session:processed_batch_size_count[$__rate_interval]))",
                        "rows",
                    ),
                    unit="short",
                    help="Mean over all models.",
                ),
                Panel(
                    title="Time inside of the model",
                    queries=_of(
                        "sum by (model_name) (rate(:tensorflow:serving:runtime_latency_sum[$__rate_interval]))"
                        " / sum by (model_name) (rate(:tensorflow:serving:runtime_latency_count[$__rate_interval])) / 1e6"
                    ),
                    unit="s",
                    help="Mean.",
                ),
                Panel(
                    title="Memory of the workers",
                    queries=_of(
                        'process_resident_memory_bytes{job="stoker-server"}',
                        "{{instance}} {{worker}}",
                    ),
                    unit="bytes",
                    alert="StokerServerMemoryGrowth",
                    help="It must not grow without limit.",
                ),
            ),
        ),
        Row(
            title="Quality of requests",
            lines=(
                Panel(
                    title="Skew",
                    queries=_of(
                        f"stoker_prediction_skew_ratio{{{_MODEL}}}", "{{model_name}} {{column}}"
                    ),
                    unit="none",
                    limit=0.2,
                    alert="StokerPredictionSkew",
                    help="Distance of each column's distribution from training.",
                ),
                Panel(
                    title="Drift",
                    queries=_of(
                        f"stoker_prediction_drift_ratio{{{_MODEL}}}", "{{model_name}} {{column}}"
                    ),
                    unit="none",
                    limit=0.2,
                    alert="StokerPredictionDrift",
                    help="Distance of each column's distribution from earlier requests.",
                ),
            ),
        ),
    ),
)
