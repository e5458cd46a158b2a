"""What a server serves, and where it listens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.registry.repository import check_is_folder, checked_name, version_folders
from stoker.serve.batching.config import BatchingConfig, WarmSizes
from stoker.serve.limits import METRICS_PATH, HttpLimits
from stoker.serve.runtime.series_limit import MAX_SERIES
from stoker.serve.security.auth import is_loopback
from stoker.serve.security.tls import read_tls
from stoker.serve.text_files import read_text_file

MAX_PORT = 65535


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeConfig:
    """One server: its models, its addresses, its limits.

    Source: TensorFlow Serving's flags; ports and the poll interval have its defaults.
    """

    models: Mapping[str, Path] = field(default_factory=dict)
    """Model name -> base path, the folder that holds its numbered versions."""

    model_config_file: Path | None = None
    """TensorFlow Serving's file of models; replaces `models`."""

    model_config_poll_s: float = 0.0
    """Seconds between two checks of that file for changes; 0: it is read once."""

    allow_unavailable_labels: bool = False
    """Whether a reload may give a new label to a version that is not loaded."""

    root: Path | None = None
    """Folder of a repository. Every model in it is served, including models that are added later."""

    host: str = "127.0.0.1"
    """The address to listen on; a loopback address accepts only local connections."""

    rest_port: int = 8501
    """TCP port of the REST interface; 0 chooses a free one."""

    grpc_port: int = 8500
    """TCP port of the gRPC interface; 0 chooses a free one."""

    grpc_socket_path: str = ""
    """Path of a Unix socket for gRPC, in addition to the port; empty: none."""

    grpc_channel_arguments: Mapping[str, str | int] = field(default_factory=dict)
    """gRPC channel arguments: name -> value."""

    poll_s: float = 1.0
    """Seconds between two searches for new versions."""

    rest_workers: int = 8
    """Maximum number of REST requests that are handled at the same time; further requests wait."""

    grpc_workers: int = 8
    """Maximum number of gRPC calls that are handled at the same time; further calls wait."""

    intra_op_threads: int = 0
    """Number of threads that compute one operation of a model; 0: one for each core."""

    inter_op_threads: int = 0
    """Maximum number of operations of a model that run at the same time; 0: only one on a CPU, in the caller's
    thread."""

    session_config_file: Path | None = None
    """TensorFlow's ConfigProto for sessions, as text; other settings override it."""

    tensor_content: bool = False
    """Whether Predict over gRPC returns outputs as bytes (`tensor_content`) instead of lists of values."""

    allow_ops: tuple[str, ...] = ()
    """Operations that a model may have in addition to those that only compute (`--allow-ops`)."""

    check_method_names: bool = False
    """Whether the method name of a signature must match the call (`--enable_signature_method_name_check`)."""

    batching: BatchingConfig = field(default_factory=BatchingConfig)
    """Default settings for joining requests."""

    per_model_batching: bool = False
    """Whether a version's own `batching_params.pbtxt` is read."""

    max_body_bytes: int = 64 << 20
    """Maximum size of a REST body, bytes. A request with a larger body gets 413, and its body is not read."""

    max_held_bytes: int = 512 << 20
    """Maximum bytes of all bodies (REST; beyond it: 503) or messages (gRPC; beyond it: RESOURCE_EXHAUSTED) that are
    held at the same time. A message may be larger if it is the only one, and small messages are always accepted."""

    max_in_flight: int = 1024
    """Maximum number of requests in progress, counted separately for REST (beyond it: 503) and gRPC (beyond it:
    RESOURCE_EXHAUSTED)."""

    http: HttpLimits = field(default_factory=HttpLimits)
    """Limits of a connection, for REST and for gRPC."""

    rest_timeout_s: float = 30.0
    """Maximum time that a REST request waits for its model, seconds. The default is TensorFlow Serving's."""

    warm_up: bool = True
    """Whether a version's own warm-up requests are run (`--enable_model_warmup`)."""

    warm_up_times: int = 1
    """How often each warm-up request is run (`--num_request_iterations_for_warmup`)."""

    saved_model_tags: tuple[str, ...] = ("serve",)
    """The tags of the graph that is served from a SavedModel."""

    mixed_precision: str = ""
    """`bfloat16` lets TensorFlow compute in bfloat16 on a CPU; empty leaves the model as exported."""

    warm_sizes: WarmSizes = "auto"
    """Whether batches are padded to a few sizes that run before a version takes requests. `auto`: only on a GPU, for
    models that XLA compiles, and for sizes that batching parameters name."""

    warm_s: float = 300.0
    """Maximum time for running the sizes of `warm_sizes` for one version, seconds."""

    per_process_gpu_memory_fraction: float = 0.0
    """Share of each GPU's memory for all workers on it, 0..1; 0: no limit for a single worker."""

    unload_first: bool = False
    """Whether the old version is unloaded before the new one is loaded, not after."""

    keys_file: Path | None = None
    """Bearer tokens and API keys with their roles; None: every client may send requests."""

    ssl_config_file: Path | None = None
    """TensorFlow Serving's SSLConfig; for REST as well as gRPC."""

    allow_unauthenticated: bool = False
    """Whether requests from other machines may be accepted without a key."""

    metrics_path: str | None = METRICS_PATH
    """Path of the metrics; None: no metrics are served."""

    max_series: int = MAX_SERIES
    """Maximum number of metric series of all models and workers together; further series are counted in `other`."""

    skew_window_s: float = 300.0
    """Minimum length of a window whose requests are compared with the training data, seconds. 0: no comparison."""

    max_run_s: float = 120.0
    """Maximum duration of one model call, seconds. If a call takes longer, a new worker replaces the worker that runs
    it. 0: no limit; with one worker, the server is then a single process."""

    max_memory_bytes: int = 0
    """Maximum memory of a worker for data, bytes. An allocation that would exceed it fails. 0: no limit."""

    profiler: bool = True
    """Whether TensorFlow's profiler service is available over gRPC (`--enable_profiler`)."""

    cors: bool = False
    """Whether web pages of other origins may call the REST interface (`--rest_api_enable_cors_support`)."""

    litert_interpreters: int = 0
    """Maximum number of calls of a version's `model.tflite` that run at the same time; 0: its SavedModel is served
    instead (`--prefer_tflite_model`, `--num_tflite_pools`)."""

    traces: bool = False
    """Whether each request becomes a span of OpenTelemetry; needs the extra `otel`."""

    access_log: str = ""
    """The file that gets a line for each request; "-": standard error; empty: no access log."""

    request_log_bytes: int = 1 << 30
    """Maximum bytes of all files of a request log, over all workers; the oldest files are removed. 0: no limit."""

    workers: int = 1
    """Number of processes that share the ports, each with its own copy of the models."""

    worker_folder: Path | None = None
    """Folder that the workers of one server share; None: this process is not one of them."""

    worker: int = 0
    """Number of this worker; no other running worker has the same number."""

    listeners: tuple[int, int] | None = None
    """Inherited file descriptors of the sockets of REST and gRPC; None: the process binds the ports."""

    listen_when_loaded: bool = True
    """Whether the process listens only after all models are loaded, and ends if a model cannot be loaded."""

    listen_when_tried: bool = False
    """Whether the process listens only after each model has been loaded or has failed. Set for a worker that replaces
    another."""

    lame_duck_s: float = 1.0
    """Seconds that a server still accepts connections after it reported "not ready", so that clients and load
    balancers can turn to other servers."""

    drain_s: float = 25.0
    """Maximum wait for requests in progress at the server's end, seconds. Kubernetes kills the process after 30 s."""

    ready_file: Path | None = None
    """File that is written when the models can be called; has the ports that the server listens on."""

    @property
    def is_supervised(self) -> bool:
        """Whether this process only starts and watches worker processes."""
        return self.worker_folder is None and (self.workers > 1 or self.max_run_s > 0)

    def __post_init__(self) -> None:
        _check_models(self)
        for name in ("rest_port", "grpc_port"):
            if not 0 <= getattr(self, name) <= MAX_PORT:
                raise ConfigError(
                    f"serve.{name} must lie in 0..{MAX_PORT}",
                    got=getattr(self, name),
                    fix="Set it to 0 to take a free port.",
                )
        for name in (
            "poll_s",
            "rest_workers",
            "grpc_workers",
            "max_body_bytes",
            "drain_s",
            "max_in_flight",
            "rest_timeout_s",
            "warm_up_times",
            "max_series",
        ):
            if not getattr(self, name) > 0:
                raise ConfigError(f"serve.{name} must be above 0", got=getattr(self, name))
        for name in (
            "max_run_s",
            "skew_window_s",
            "max_memory_bytes",
            "request_log_bytes",
            "warm_s",
            "intra_op_threads",
            "inter_op_threads",
            "litert_interpreters",
        ):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"serve.{name} must not be below 0", got=getattr(self, name))
        if self.grpc_socket_path and self.workers > 1:
            raise ConfigError(
                "a Unix socket belongs to one worker", got=Plain(f"{self.workers} workers")
            )
        if self.workers < 1:
            raise ConfigError("serve.workers must be at least 1", got=self.workers)
        _check_address(self)
        _check_traces(self)
        _check_devices(self)
        if self.lame_duck_s < 0:
            raise ConfigError("serve.lame_duck_s must not be below 0", got=self.lame_duck_s)


def what_to_serve(folder: Path, *, model_name: str | None = None) -> ServeConfig:
    """Return the configuration that serves a folder: a model's folder of versions, or a repository of models.

    Args:
        folder: `<root>` or `<root>/<model>`; an empty folder is a repository.
        model_name: Name of the model if the folder has versions; None: the folder's name.

    Raises:
        UserError: the folder does not exist, or is a SavedModel instead of a folder of numbered versions.
    """
    check_is_folder(folder)
    if not folder.is_dir():
        raise UserError(
            "the path to serve must be a folder",
            got=Plain(f"{folder}, {'a file' if folder.exists() else 'which does not exist'}"),
            fix="Push a model there (`stoker push`), or name another folder.",
        )
    if any((folder / name).is_file() for name in ("saved_model.pb", "saved_model.pbtxt")):
        raise UserError(
            f"{folder} must be a repository or a model's folder of numbered versions",
            got=Plain("one SavedModel"),
            fix="Push it (`stoker push`), or move it to MODELS/NAME/1.",
        )
    if model_name is not None or version_folders(folder):
        return ServeConfig(models={model_name or folder.resolve().name: folder})
    return ServeConfig(root=folder)


def read_metrics_path(path: Path) -> str | None:
    """Path of the metrics in TensorFlow Serving's `monitoring_config_file`; None if it names none.

    Raises:
        ConfigError: the file does not exist, or has another form.
    """
    found = read_text_file(
        path, "MonitoringConfig", full_name="tensorflow.serving.MonitoringConfig"
    ).prometheus_config
    if not found.enable:
        return None
    if found.path and not found.path.startswith("/"):
        raise ConfigError("the path of prometheus_config must begin with /", got=found.path)
    return found.path or METRICS_PATH


def _check_address(config: ServeConfig) -> None:
    knows_clients = config.keys_file is not None or (
        config.ssl_config_file is not None and read_tls(config.ssl_config_file).client_verify
    )
    if config.allow_unauthenticated or knows_clients or is_loopback(config.host):
        return
    raise ConfigError(
        "an address that other machines reach must not be served without authentication",
        got=config.host,
        fix="Give --keys-file, or an --ssl_config_file with client_verify, or "
        "--allow-unauthenticated.",
    )


def _check_devices(config: ServeConfig) -> None:
    if config.mixed_precision not in ("", "bfloat16"):
        raise ConfigError(
            "--mixed_precision must be bfloat16, or be left out", got=config.mixed_precision
        )
    if config.warm_sizes not in get_args(WarmSizes):
        raise ConfigError(
            f"--warm-up-sizes must be one of {', '.join(get_args(WarmSizes))}",
            got=config.warm_sizes,
        )
    if not 0 <= config.per_process_gpu_memory_fraction <= 1:
        raise ConfigError(
            "--per_process_gpu_memory_fraction must lie in 0..1",
            got=config.per_process_gpu_memory_fraction,
        )


_TRACING = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""The modules that the extra `otel` installs."""


def _check_traces(config: ServeConfig) -> None:
    if not config.traces:
        return
    for name in _TRACING:
        try:
            found = find_spec(name)
        except ModuleNotFoundError:  # a parent package is missing
            found = None
        if found is None:
            raise ConfigError(
                "traces need OpenTelemetry, which the extra 'otel' installs",
                got=Plain(f"no module {name}"),
                fix="Run `pip install 'stoker[otel]'`, or leave --traces out.",
            )


def _check_models(config: ServeConfig) -> None:
    given = [bool(config.models), config.root is not None, config.model_config_file is not None]
    if sum(given) != 1:
        raise ConfigError(
            "exactly one of a list of models, a repository and a model configuration must be given",
            got=Plain("several" if sum(given) else "none"),
            fix="Name a folder, or --model_config_file, or --model_name with --model_base_path.",
        )
    if config.model_config_poll_s < 0:
        raise ConfigError(
            "serve.model_config_poll_s must not be below 0", got=config.model_config_poll_s
        )
    for name in config.models:
        checked_name(name)
