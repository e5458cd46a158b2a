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
    """TensorFlow Serving's file of models, in the place of `models`."""

    model_config_poll_s: float = 0.0
    """Seconds between two looks whether that file has changed; 0 never looks again."""

    allow_unavailable_labels: bool = False
    """Whether a reload may give a new label to a version that is not loaded."""

    root: Path | None = None
    """A repository: every model in it is served, also those that come later."""

    host: str = "127.0.0.1"
    """The address to listen on; the loopback lets nobody else in."""

    rest_port: int = 8501
    """TCP port of the REST interface; 0 takes a free one."""

    grpc_port: int = 8500
    """TCP port of the gRPC interface; 0 takes a free one."""

    grpc_socket_path: str = ""
    """A Unix socket that gRPC is answered on too; none if empty."""

    grpc_channel_arguments: Mapping[str, str | int] = field(default_factory=dict)
    """More of gRPC's own settings, by their names."""

    poll_s: float = 1.0
    """Seconds between two looks for new versions."""

    rest_workers: int = 8
    """Most REST requests that are worked on at once; others wait."""

    grpc_workers: int = 8
    """Most gRPC calls that are worked on at once; others wait."""

    intra_op_threads: int = 0
    """Threads that compute one operation of a model; 0: one for each core."""

    inter_op_threads: int = 0
    """Operations of a model that run at once; 0: one on a CPU, in the caller's thread."""

    session_config_file: Path | None = None
    """TensorFlow's ConfigProto for sessions, as text; other settings override it."""

    tensor_content: bool = False
    """Whether Predict over gRPC returns its outputs as bytes, not as lists of values."""

    allow_ops: tuple[str, ...] = ()
    """Operations that a model may have in addition to those that only compute (`--allow-ops`)."""

    check_method_names: bool = False
    """Whether a signature must name the method that it is asked by (`--enable_signature_method_name_check`)."""

    batching: BatchingConfig = field(default_factory=BatchingConfig)
    """How requests are joined."""

    per_model_batching: bool = False
    """Whether a version's own `batching_params.pbtxt` is read."""

    max_body_bytes: int = 64 << 20
    """Largest REST body; a larger one gets 413 and is not read."""

    max_held_bytes: int = 512 << 20
    """Most bytes of bodies and messages held at once, each for REST (503) and gRPC (RESOURCE_EXHAUSTED);
    one message alone may be larger, and small ones always are taken."""

    max_in_flight: int = 1024
    """Most requests under way, each for REST (503) and gRPC (RESOURCE_EXHAUSTED)."""

    http: HttpLimits = field(default_factory=HttpLimits)
    """What a connection may take, for REST and for gRPC."""

    rest_timeout_s: float = 30.0
    """Longest that a REST request waits for its model; TensorFlow Serving's default."""

    warm_up: bool = True
    """Whether a version's own warm-up requests are run (`--enable_model_warmup`)."""

    warm_up_times: int = 1
    """How often each of these is run (`--num_request_iterations_for_warmup`)."""

    saved_model_tags: tuple[str, ...] = ("serve",)
    """The tags of the graph of a SavedModel that is served."""

    mixed_precision: str = ""
    """`bfloat16` lets TensorFlow compute in it on a CPU; empty leaves a model as it was exported."""

    warm_sizes: WarmSizes = "auto"
    """Whether batches are padded to a few sizes that run before a version takes requests. `auto`:
    on a GPU, for models that XLA compiles, and for sizes that batching parameters name."""

    warm_s: float = 300.0
    """Longest time for running these sizes of one version, seconds."""

    per_process_gpu_memory_fraction: float = 0.0
    """Share of each GPU's memory for all workers on it, 0..1; 0: no limit for a single worker."""

    unload_first: bool = False
    """Whether what a new version replaces is unloaded before that is loaded, not after."""

    keys_file: Path | None = None
    """Bearer tokens and API keys with their roles; everybody may ask if None."""

    ssl_config_file: Path | None = None
    """TensorFlow Serving's SSLConfig; for REST as well as gRPC."""

    allow_unauthenticated: bool = False
    """Whether others than this machine may be let in without a key."""

    metrics_path: str | None = METRICS_PATH
    """Where the metrics are; nowhere if None."""

    max_series: int = MAX_SERIES
    """Most series of metrics of all models together, over all workers; further ones count as `other`."""

    skew_window_s: float = 300.0
    """Shortest window of requests that is compared with the training data, seconds. 0: none is."""

    max_run_s: float = 120.0
    """Longest that a model may work on one call; then another worker takes the place of its own.
    0: for ever, and the server is one process."""

    max_memory_bytes: int = 0
    """Most memory of a worker for data; what a model wants beyond it, it is refused. 0: no limit."""

    profiler: bool = True
    """Whether TensorFlow's profiler service answers by gRPC (`--enable_profiler`)."""

    cors: bool = False
    """Whether pages of other origins may ask by REST (`--rest_api_enable_cors_support`)."""

    litert_interpreters: int = 0
    """Calls of a version's `model.tflite` that run at once; 0 serves its SavedModel
    (`--prefer_tflite_model`, `--num_tflite_pools`)."""

    traces: bool = False
    """Whether each request becomes a span of OpenTelemetry; the extra `otel` has what that needs."""

    access_log: str = ""
    """The file of a line for each request, "-" for standard error; none if empty."""

    request_log_bytes: int = 1 << 30
    """Most bytes of all files of one log of requests, over all workers; the oldest go first. 0: no limit."""

    workers: int = 1
    """Processes that share the ports, each with its own copy of the models."""

    worker_folder: Path | None = None
    """Where the workers of one server keep what they have in common; None where there is one only.
    The ports are shared then."""

    worker: int = 0
    """This one's number; no other that lives has it."""

    listeners: tuple[int, int] | None = None
    """File descriptors of the sockets of REST and gRPC that this process inherited; None: it binds the ports."""

    listen_when_loaded: bool = True
    """Whether it listens only after all models are loaded; one that cannot be loaded ends it."""

    listen_when_tried: bool = False
    """Whether it listens after each model was loaded or has failed: it replaces another worker."""

    lame_duck_s: float = 1.0
    """Seconds between "not ready" and the last accept, for clients and balancers to turn away."""

    drain_s: float = 25.0
    """Longest wait for requests under way at the end; Kubernetes kills after 30 s."""

    ready_file: Path | None = None
    """Written, with the real ports, when the models can be called."""

    @property
    def is_supervised(self) -> bool:
        """Whether this process only starts others that serve, and watches over them."""
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
    """A configuration for a folder: one model's versions, or a repository of models.

    Args:
        folder: `<root>` or `<root>/<model>`; a folder without anything is a repository to be.
        model_name: What one model is to be called; its folder's name if None.

    Raises:
        UserError: there is no such folder, or it is a SavedModel without a version's number.
    """
    check_is_folder(folder)
    if not folder.is_dir():
        raise UserError(
            "the folder to serve must exist",
            got=str(folder),
            fix="Push a model there (`stoker push`), or name another.",
        )
    if any((folder / name).is_file() for name in ("saved_model.pb", "saved_model.pbtxt")):
        raise UserError(
            f"{folder} must be a repository or a model's folder of numbered versions",
            got=Plain("one SavedModel"),
            fix="Push it (`stoker push`), or lay it at MODELS/NAME/1.",
        )
    if model_name is not None or version_folders(folder):
        return ServeConfig(models={model_name or folder.resolve().name: folder})
    return ServeConfig(root=folder)


def read_metrics_path(path: Path) -> str | None:
    """Where TensorFlow Serving's `monitoring_config_file` has the metrics; None where it has none.

    Raises:
        ConfigError: the file is not there, or not in its form.
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
        "an address that others reach must not be served without authentication",
        got=config.host,
        fix="Give --keys-file, or an --ssl_config_file with client_verify, or say "
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
"""What the extra `otel` brings, by its modules."""


def _check_traces(config: ServeConfig) -> None:
    if not config.traces:
        return
    for name in _TRACING:
        try:
            found = find_spec(name)
        except ModuleNotFoundError:  # of a package above it
            found = None
        if found is None:
            raise ConfigError(
                "traces need OpenTelemetry, which the extra 'otel' brings",
                got=Plain(f"no module {name}"),
                fix="Run `pip install 'stoker[otel]'`, or leave --traces out.",
            )


def _check_models(config: ServeConfig) -> None:
    given = [bool(config.models), config.root is not None, config.model_config_file is not None]
    if sum(given) != 1:
        raise ConfigError(
            "one of models, a repository and a model configuration must be served",
            got=Plain("several" if sum(given) else "none"),
            fix="Name a folder, or --model_config_file, or --model_name with --model_base_path.",
        )
    if config.model_config_poll_s < 0:
        raise ConfigError(
            "serve.model_config_poll_s must not be below 0", got=config.model_config_poll_s
        )
    for name in config.models:
        checked_name(name)
