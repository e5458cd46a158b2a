"""Recording rules and alerts about servers and rollouts, except the burn rates."""

from __future__ import annotations

from stoker.monitor.rules.objectives import Objective, p99s_ms
from stoker.monitor.rules.rule import Alert, Recording, Severity
from stoker.monitor.rules.slo import MIN_RATE
from stoker.monitor.settings import RuleSettings

_RATE = "model:stoker_requests:rate5m"

RECORDINGS = (
    Recording(
        record="model:stoker_request_latency_seconds:p99_5m",
        expr="histogram_quantile(0.99, sum by (model_name, le) (rate(stoker_request_latency_bucket[5m]))) / 1e6",
    ),
    Recording(
        record="model:stoker_request_latency_seconds:p50_5m",
        expr="histogram_quantile(0.5, sum by (model_name, le) (rate(stoker_request_latency_bucket[5m]))) / 1e6",
    ),
    Recording(
        # Little's law: waiting requests / requests per second = seconds of wait. All models of a server share its
        # threads, so the requests that wait for a thread are divided among the models by their request rates.
        record="model:stoker_thread_wait_seconds:avg5m",
        expr="sum by (model_name) (sum by (instance, model_name) (rate(stoker_request_count[5m]))"
        " * on (instance) group_left () (sum by (instance) (avg_over_time(stoker_requests_without_thread[5m]))"
        f" / (sum by (instance) (rate(stoker_request_count[5m])) > 0))) / ({_RATE} > 0) or 0 * {_RATE}",
    ),
    Recording(
        record="model:stoker_queue_wait_seconds:avg5m",
        expr=f"(sum by (model_name) (avg_over_time(stoker_queued_requests[5m])) or 0 * {_RATE}) / {_RATE}"
        " + model:stoker_thread_wait_seconds:avg5m",
    ),
    Recording(
        record="model:stoker_batch_padding:ratio_rate5m",
        expr="sum by (model_name) (rate(:tensorflow:serving:batching_session:padding_size_sum[5m]))"
        " / sum by (model_name) (rate(:tensorflow:serving:batching_session:processed_batch_size_sum[5m]))",
    ),
)

_MODEL = "Model {{ $labels.model_name }}"

_LOADED = "max by (instance, model_name) (stoker_model_loaded)"
_LOADING = 'max by (instance, model_name) (stoker_model_loaded{version=""})'
"""PromQL: models of which no version is loaded yet and none has failed to load; the value is 0."""

_ROLLED_BACK = 'max by (model_name) (stoker_rollout_phase{phase="rolled back"})'


def _queue_growing(objective: Objective) -> Alert:
    return Alert(
        name="StokerQueueGrowing",
        # Models with a low rate are left out: a single scrape that sees a waiting request would look like a long
        # wait. Models with rate 0 are not left out (`> 0`): if their requests wait, they hang, and the alert must fire.
        expr=f"model:stoker_queue_wait_seconds:avg5m{objective.braces} > {objective.value / 1e3:g}"
        f" unless {_RATE} > 0 < {MIN_RATE}",
        lasts="10m",  # longer than the window of 5 minutes, in which a single scrape may see a peak
        severity=Severity.TICKET,
        summary="Requests of model {{ $labels.model_name }} wait {{ $value | humanizeDuration }} before they run",
        description=f"The wait for a thread and in the queue is longer than {objective.value:g} ms, the objective for the whole answer: add servers or threads, or raise the batch size.",
        labels={"objective": f"{objective.value:g} ms"},
    )


def alerts(settings: RuleSettings) -> tuple[Alert, ...]:
    """Return the alerts of servers and rollouts."""
    return (
        *map(_queue_growing, p99s_ms(settings.slo)),
        Alert(
            name="StokerModelNotLoaded",
            expr=f"{_LOADED} == 0 unless {_LOADING}",
            lasts="1m",
            severity=Severity.PAGE,
            summary=f"{_MODEL} failed to load at {{{{ $labels.instance }}}}",
            description="The server could not load any version of the model; requests to the model fail.",
            labels={"state": "failed"},
        ),
        Alert(
            name="StokerModelNotLoaded",
            expr=_LOADING,
            lasts="10m",  # time for a server that has just started to load its models
            severity=Severity.PAGE,
            summary=f"{_MODEL} is not loaded at {{{{ $labels.instance }}}}",
            description="For 10 minutes, the model has been loading, or its folder has had no version; requests to the model fail.",
            labels={"state": "loading"},
        ),
        Alert(
            name="StokerServerMemoryGrowth",
            expr='min_over_time(process_resident_memory_bytes{job="stoker-server"}[1h])'
            ' > 1.2 * max_over_time(process_resident_memory_bytes{job="stoker-server"}[1h] offset 6h)',
            lasts="1h",
            severity=Severity.TICKET,
            summary="The server at {{ $labels.instance }} has grown to {{ $value | humanize1024 }}B",
            description="In 6 hours its memory grew by more than 20 % and did not fall again: more models, larger requests, or a leak.",
        ),
        Alert(
            name="StokerPredictionSkew",
            expr="stoker_prediction_skew_ratio > 0.2",
            lasts="30m",
            severity=Severity.TICKET,
            summary=f"{_MODEL}: column {{{{ $labels.column }}}} of requests differs from training",
            description="The distribution of the column differs from the training data; `stoker skew` with a request log shows both.",
        ),
        Alert(
            name="StokerPredictionDrift",
            expr="stoker_prediction_drift_ratio > 0.2",
            lasts="30m",
            severity=Severity.TICKET,
            summary=f"{_MODEL}: column {{{{ $labels.column }}}} of requests has changed",
            description="The distribution of the column differs from earlier requests: a client has changed, or the world has.",
        ),
        Alert(
            name="StokerRolledBack",
            expr=f"({_ROLLED_BACK} == 1) unless ({_ROLLED_BACK.removesuffix(')')} offset 1h) == 1)",
            severity=Severity.TICKET,
            summary="The rollout of model {{ $labels.model_name }} was rolled back",
            description="Within the last hour a gate refused the candidate, and all traffic is back on the previous version: `stoker rollout status` shows the reason.",
            keep="",
        ),
    )
