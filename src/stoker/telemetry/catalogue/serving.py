"""The metrics of `stoker serve`: TensorFlow Serving's metrics with their original names, and Stoker's own metrics.

Source of the names that begin with a colon: TensorFlow Serving, `servables/tensorflow/util.cc`, `batching_session.cc`.
"""

from __future__ import annotations

from functools import partial

from stoker.telemetry.catalogue.metric import Kind, Metric, Writer

_metric = partial(Metric, writer=Writer.SERVER)
_SERVING, _BATCHING = ":tensorflow:serving:", ":tensorflow:serving:batching_session:"

REQUEST_COUNT = _metric(
    name=f"{_SERVING}request_count",
    kind=Kind.COUNTER,
    unit="",
    labels=("model_name", "status"),
    help="Requests by model and status.",
)
REQUEST_LATENCY = _metric(
    name=f"{_SERVING}request_latency",
    kind=Kind.HISTOGRAM,
    unit="microseconds",
    labels=("model_name", "API", "entrypoint"),
    help="Time to answer a request, microseconds.",
)
RUNTIME_LATENCY = _metric(
    name=f"{_SERVING}runtime_latency",
    kind=Kind.HISTOGRAM,
    unit="microseconds",
    labels=("model_name", "API", "runtime"),
    help="Time inside the model, microseconds.",
)
EXAMPLE_COUNTS = _metric(
    name=f"{_SERVING}request_example_counts",
    kind=Kind.HISTOGRAM,
    unit="",
    labels=("model",),
    help="Examples per request to classify or regress.",
)
EXAMPLE_COUNT_TOTAL = _metric(
    name=f"{_SERVING}request_example_count_total",
    kind=Kind.COUNTER,
    unit="",
    labels=("model",),
    help="Examples classified or regressed.",
)
QUEUING_LATENCY = _metric(
    name=f"{_BATCHING}queuing_latency",
    kind=Kind.HISTOGRAM,
    unit="microseconds",
    help="Time that a request waits for its batch, microseconds.",
)
WRAPPED_RUN_COUNT = _metric(
    name=f"{_BATCHING}wrapped_run_count",
    kind=Kind.COUNTER,
    unit="",
    help="Batches that were run.",
)
INPUT_BATCH_SIZE = _metric(
    name=f"{_BATCHING}input_batch_size",
    kind=Kind.HISTOGRAM,
    unit="",
    help="Rows of a request.",
)
PROCESSED_BATCH_SIZE = _metric(
    name=f"{_BATCHING}processed_batch_size",
    kind=Kind.HISTOGRAM,
    unit="",
    help="Rows of a batch.",
)
PADDING_SIZE = _metric(
    name=f"{_BATCHING}padding_size",
    kind=Kind.HISTOGRAM,
    unit="",
    help="Padding rows of a batch.",
)
VERSION_REQUEST_COUNT = _metric(
    name="stoker_request_count",
    kind=Kind.COUNTER,
    unit="",
    labels=("model_name", "version", "status"),
    help="Requests by model, version and status; version is empty for requests that failed before reaching one.",
)
VERSION_REQUEST_LATENCY = _metric(
    name="stoker_request_latency",
    kind=Kind.HISTOGRAM,
    unit="microseconds",
    labels=("model_name", "version"),
    help="Time that a version takes to answer a request, including the wait for a thread, microseconds.",
)
MODEL_LOADED = _metric(
    name="stoker_model_loaded",
    kind=Kind.GAUGE,
    unit="",
    labels=("model_name", "version"),
    help="1: the scraped worker can call this version; 0: it failed to load it. 0 with an empty version: the model is not loaded yet.",
)
QUEUED_REQUESTS = _metric(
    name="stoker_queued_requests",
    kind=Kind.GAUGE,
    unit="",
    labels=("model_name",),
    help="Requests that wait for their model.",
)
REQUESTS_WITHOUT_THREAD = _metric(
    name="stoker_requests_without_thread",
    kind=Kind.GAUGE,
    unit="",
    labels=("entrypoint",),
    help="Requests that wait for one of the server's threads.",
)
REQUESTS_UNDER_WAY = _metric(
    name="stoker_requests_under_way",
    kind=Kind.GAUGE,
    unit="",
    labels=("entrypoint",),
    help="Requests that are being answered.",
)
HEAD_CACHE = _metric(
    name="stoker_head_cache",
    kind=Kind.COUNTER,
    unit="",
    labels=("result",),
    help="Small REST requests, by whether their headers were already cached.",
)
ROLLOUT_STATE_AGE = _metric(
    name="stoker_rollout_state_age_seconds",
    kind=Kind.GAUGE,
    unit="seconds",
    labels=("model_name", "worker"),
    help="Time since a worker last read the state of a model's rollout, seconds.",
)
WORKERS_REPLACED = _metric(
    name="stoker_workers_replaced",
    kind=Kind.COUNTER,
    unit="",
    labels=("reason",),
    help="Workers that were replaced, by reason.",
)
LOG_DROPPED = _metric(
    name="stoker_log_dropped",
    kind=Kind.COUNTER,
    unit="",
    labels=("log",),
    help="Log entries that were dropped so that no request has to wait.",
)
COPIES = _metric(
    name="stoker_rollout_copies",
    kind=Kind.COUNTER,
    unit="",
    labels=("model_name", "result"),
    help="Requests copied to a version in shadow, by result.",
)
COPY_LATENCY = _metric(
    name="stoker_rollout_copy_latency",
    kind=Kind.HISTOGRAM,
    unit="microseconds",
    labels=("model_name", "version"),
    help="Time that a copied request takes in the model of each version, microseconds.",
)
PREDICTION_SKEW = _metric(
    name="stoker_prediction_skew_ratio",
    kind=Kind.GAUGE,
    unit="ratio",
    labels=("model_name", "column"),
    help="Difference of a column's values between sampled requests and training data, beyond chance.",
)
PREDICTION_DRIFT = _metric(
    name="stoker_prediction_drift_ratio",
    kind=Kind.GAUGE,
    unit="ratio",
    labels=("model_name", "column"),
    help="Difference of a column's values between the last two windows of sampled requests, beyond chance.",
)
WORKER_PID = _metric(
    name="stoker_worker_pid",
    kind=Kind.GAUGE,
    unit="",
    labels=("worker",),
    help="Process ID of each worker.",
)
RESIDENT_MEMORY = _metric(
    name="process_resident_memory_bytes",
    kind=Kind.GAUGE,
    unit="bytes",
    labels=("worker",),
    help="Memory of each worker, bytes.",
)

METRICS = tuple(each for each in list(globals().values()) if isinstance(each, Metric))
"""All metrics of servers, in the order of this file."""
