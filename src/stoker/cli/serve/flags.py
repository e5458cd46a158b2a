"""The flags of `stoker serve`, each with Stoker's name and TensorFlow Serving's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def option(*names: str, help_text: str) -> Any:
    """Return an option with Stoker's name and TensorFlow Serving's name, which has underscores."""
    return typer.Option(*names, help=help_text)


Folder = Annotated[
    Path | None,
    typer.Argument(
        help="An experiment, a repository of models, or one model's folder of versions."
    ),
]

ModelName = Annotated[
    str | None,
    option("--model-name", "--model_name", help_text="Name of the model, if only one is served."),
]

ModelBasePath = Annotated[
    Path | None,
    option("--model-base-path", "--model_base_path", help_text="Folder of the model's versions."),
]

ModelConfigFile = Annotated[
    Path | None,
    option(
        "--model-config-file",
        "--model_config_file",
        help_text="TensorFlow Serving's model_config_file: models, versions and labels.",
    ),
]

ModelConfigPollS = Annotated[
    float,
    option(
        "--model-config-poll-s",
        "--model_config_file_poll_wait_seconds",
        help_text="Interval at which --model-config-file is read again, seconds; 0: read it once.",
    ),
]

AllowUnavailableLabels = Annotated[
    bool,
    option(
        "--allow-unavailable-labels",
        "--allow_version_labels_for_unavailable_models",
        help_text="Allow a reload to assign a new label to a version that is not loaded.",
    ),
]

Batching = Annotated[
    bool,
    typer.Option(
        "--batching/--no-batching", help="Combine requests that wait for a model into one batch."
    ),
]

EnableBatching = Annotated[
    bool,
    typer.Option("--enable_batching", help="TensorFlow Serving's flag; batching is on by default."),
]

BatchingParametersFile = Annotated[
    Path | None,
    option(
        "--batching-parameters-file",
        "--batching_parameters_file",
        help_text="File with TensorFlow Serving's BatchingParameters.",
    ),
]

PerModelBatching = Annotated[
    bool,
    option(
        "--per-model-batching",
        "--enable_per_model_batching_parameters",
        help_text="Read batching_params.pbtxt from the folder of each version.",
    ),
]

CheckMethodNames = Annotated[
    bool,
    option(
        "--check-method-names",
        "--enable_signature_method_name_check",
        help_text="Allow classify and regress only for signatures with that method name.",
    ),
]

MaxInFlight = Annotated[
    int,
    typer.Option(
        "--max-in-flight", help="Maximum number of concurrent requests; further ones get 503."
    ),
]

MaxBodyMb = Annotated[
    int,
    typer.Option("--max-body-mb", help="Maximum size of a REST body, MiB; a larger body gets 413."),
]

RestApiTimeoutInMs = Annotated[
    int,
    option(
        "--rest-api-timeout-in-ms",
        "--rest_api_timeout_in_ms",
        help_text="Maximum time that a REST request waits for its model.",
    ),
]

RestApiNumThreads = Annotated[
    int,
    option(
        "--rest-api-num-threads",
        "--rest_api_num_threads",
        help_text="Maximum number of REST requests that are processed concurrently.",
    ),
]

GrpcNumThreads = Annotated[
    int,
    option(
        "--grpc-num-threads",
        "--grpc_max_threads",
        help_text="Maximum number of gRPC calls that are processed concurrently.",
    ),
]

IntraOpThreads = Annotated[
    int,
    option(
        "--tensorflow-intra-op-parallelism",
        "--tensorflow_intra_op_parallelism",
        help_text="Number of threads that compute one operation of a model; 0: one per core.",
    ),
]

InterOpThreads = Annotated[
    int,
    option(
        "--tensorflow-inter-op-parallelism",
        "--tensorflow_inter_op_parallelism",
        help_text="Maximum number of operations of a model that run at once. 0: on a CPU, one operation at a time, in the caller's thread; on a GPU, TensorFlow's default.",
    ),
]

SessionThreads = Annotated[
    int,
    option(
        "--tensorflow-session-parallelism",
        "--tensorflow_session_parallelism",
        help_text="Value of both the intra-op and the inter-op option if they are 0.",
    ),
]

SessionConfigFile = Annotated[
    Path | None,
    option(
        "--tensorflow-session-config-file",
        "--tensorflow_session_config_file",
        help_text="File with TensorFlow's ConfigProto for sessions, in text format.",
    ),
]

TensorContent = Annotated[
    bool,
    typer.Option(
        "--enable_serialization_as_tensor_content",
        help="Send the outputs of Predict by gRPC as bytes (tensor_content).",
    ),
]

PreferTflite = Annotated[
    bool,
    typer.Option(
        "--prefer_tflite_model",
        help="If a version has a model.tflite, serve that file with LiteRT.",
    ),
]

NumTflitePools = Annotated[
    int,
    typer.Option(
        "--num_tflite_pools",
        help="Maximum number of calls of one model.tflite that run at once; 0: one per core.",
    ),
]

EnableProfiler = Annotated[
    bool,
    typer.Option(
        "--enable_profiler/--no-profiler",
        help="Answer TensorBoard's profiler on the gRPC port (with keys: the admin role only).",
    ),
]

EnableCors = Annotated[
    bool,
    typer.Option(
        "--rest_api_enable_cors_support",
        help="Allow REST requests from web pages of other origins (CORS).",
    ),
]

MonitoringConfigFile = Annotated[
    Path | None,
    option(
        "--monitoring-config-file",
        "--monitoring_config_file",
        help_text="File with TensorFlow Serving's MonitoringConfig.",
    ),
]

SslConfigFile = Annotated[
    Path | None,
    option(
        "--ssl-config-file",
        "--ssl_config_file",
        help_text="File with TensorFlow Serving's SSLConfig: TLS on both ports.",
    ),
]

EnableModelWarmup = Annotated[
    bool,
    typer.Option(
        "--enable_model_warmup/--no-model-warm-up",
        help="Run a version's warm-up requests before it receives traffic.",
    ),
]

WarmUpTimes = Annotated[
    int,
    typer.Option(
        "--num_request_iterations_for_warmup",
        help="Number of times that each warm-up request is run.",
    ),
]

SavedModelTags = Annotated[
    str,
    typer.Option(
        "--saved_model_tags", help="Comma-separated tags of the SavedModel graph to serve."
    ),
]

MixedPrecision = Annotated[
    str,
    typer.Option(
        "--mixed_precision", help="bfloat16: compute in bfloat16 on CPUs where it is faster."
    ),
]

WarmUpSizes = Annotated[
    str,
    typer.Option(
        "--warm-up-sizes",
        help="Pad batches to a few sizes, and run each size before a version takes requests: auto (on for a "
        "GPU and for models compiled by XLA), on, off.",
    ),
]

WarmUpS = Annotated[
    float,
    typer.Option(
        "--warm-up-s",
        help="Maximum time to run the sizes of --warm-up-sizes for a version, seconds.",
    ),
]

GpuMemoryFraction = Annotated[
    float,
    option(
        "--per-process-gpu-memory-fraction",
        "--per_process_gpu_memory_fraction",
        help_text="Maximum share of each GPU's memory, 0..1, split among the workers on that GPU; 0: no limit.",
    ),
]

KeysFile = Annotated[
    Path | None,
    typer.Option("--keys-file", help="YAML file of bearer tokens and API keys with their roles."),
]

AllowUnauthenticated = Annotated[
    bool,
    typer.Option(
        "--allow-unauthenticated", help="Accept unauthenticated requests from other machines."
    ),
]

UnloadFirst = Annotated[
    bool,
    typer.Option(
        "--unload-first",
        help="Unload the old version before the new one is loaded, not after: memory need not hold both, "
        "but the model is not served in between.",
    ),
]

AllowOps = Annotated[
    list[str] | None,
    typer.Option(
        "--allow-ops",
        help="Allow models to contain this unsafe operation; may be given several times.",
    ),
]

MaxRunS = Annotated[
    float,
    typer.Option(
        "--max-run-s",
        help="Maximum time of one model call, seconds; after it, the worker process is replaced. 0: no limit; with one worker, the server is then a single process.",
    ),
]

MaxMemoryMb = Annotated[
    int,
    typer.Option(
        "--max-memory-mb", help="Maximum data memory of a worker process, MiB; 0: no limit."
    ),
]

AccessLog = Annotated[
    str,
    typer.Option("--access-log", help="File for one JSON line per request; - writes to stderr."),
]

GateFolder = Annotated[
    Path | None,
    typer.Option(
        "--gate-folder",
        exists=True,
        file_okay=False,
        help="Folder with the modules of a rollout's Python gates. Default: Python gates are not called.",
    ),
]

Traces = Annotated[
    bool,
    typer.Option(
        "--traces",
        help="Send an OpenTelemetry span per request; the OTEL_ environment variables configure the receiver.",
    ),
]

RequestLogMb = Annotated[
    int,
    typer.Option(
        "--request-log-mb",
        help="Maximum disk space of a request log, MiB; the oldest files are deleted first. 0: no limit.",
    ),
]

MaxSeries = Annotated[
    int,
    typer.Option(
        "--max-series",
        help="Maximum number of metric series of all models together; further series are counted as model `other`.",
    ),
]

SkewWindowS = Annotated[
    float,
    typer.Option(
        "--skew-window-s",
        help="Minimum window of requests that is compared with the training data, seconds. 0: off.",
    ),
]

Workers = Annotated[
    int, typer.Option("--workers", help="Number of worker processes; they share the two ports.")
]

WorkerFolder = Annotated[Path | None, typer.Option("--worker-folder", hidden=True)]

Worker = Annotated[int, typer.Option("--worker", hidden=True)]

Listeners = Annotated[tuple[int, int] | None, typer.Option("--listeners", hidden=True)]

ListenWhenLoaded = Annotated[
    bool,
    typer.Option(
        "--listen-when-loaded/--no-listen-when-loaded",
        help="Open the ports when every model is loaded, and exit if a model cannot be loaded; or open them immediately.",
    ),
]

ListenWhenTried = Annotated[bool, typer.Option("--listen-when-tried", hidden=True)]

Host = Annotated[str, typer.Option(help="The address to listen on.")]

RestApiPort = Annotated[
    int,
    option("--rest-api-port", "--rest_api_port", help_text="Port for REST; 0 selects a free port."),
]

Port = Annotated[int, typer.Option("--port", help="Port for gRPC; 0 selects a free port.")]

GrpcSocketPath = Annotated[
    str,
    option(
        "--grpc-socket-path",
        "--grpc_socket_path",
        help_text="Unix socket for gRPC, in addition to the port.",
    ),
]

GrpcChannelArguments = Annotated[
    str,
    option(
        "--grpc-channel-arguments",
        "--grpc_channel_arguments",
        help_text="gRPC channel arguments: NAME=VALUE,NAME=VALUE.",
    ),
]

PollS = Annotated[
    float,
    option(
        "--poll-s",
        "--file-system-poll-wait-seconds",
        "--file_system_poll_wait_seconds",
        help_text="Interval between checks for new versions, seconds.",
    ),
]

ReadyFile = Annotated[
    Path | None,
    option(
        "--ready-file",
        "--ready_file",
        help_text="File that receives the actual ports when the server is ready.",
    ),
]

StopWithStdin = Annotated[
    bool,
    typer.Option("--stop-with-stdin", help="Stop, as on SIGTERM, when standard input is closed."),
]

Version = Annotated[
    bool, typer.Option("--version", help="Print the versions of Stoker and TensorFlow.")
]

AsJson = Annotated[bool, typer.Option("--json", help="Print the addresses as JSON.")]
