"""The server: models, REST and gRPC interface, and their shutdown."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import tensorflow as tf
from tensorflow.core.protobuf import rewriter_config_pb2

from stoker.core.errors import ConfigError, Plain, UserError
from stoker.registry.exported_model import has_gpu, open_devices, session_config
from stoker.serve.config import ServeConfig
from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.extra_routes import ExtraRoutes
from stoker.serve.grpc.health import Health
from stoker.serve.grpc.service import GrpcOptions, make_grpc_server
from stoker.serve.limits import METRICS_PATH
from stoker.serve.observability.access_log import AccessFile, AccessLog, CombinedLog
from stoker.serve.observability.counters import Counter
from stoker.serve.observability.metrics import ServeMetrics
from stoker.serve.observability.prediction_quality import PredictionQuality
from stoker.serve.process.ready import Ready
from stoker.serve.process.worker import stuck_file
from stoker.serve.request_log.writer import RequestLog
from stoker.serve.rest.app import PROBES, RestApp, RestOptions
from stoker.serve.rest.http import HttpServer
from stoker.serve.rest.inline_predict import InlinePredict
from stoker.serve.rest.scrape import forms_of
from stoker.serve.routing import Router
from stoker.serve.runtime.sockets import BACKLOG, bound_path, bound_socket, inherited_socket
from stoker.serve.runtime.stuck_call_watchdog import StuckCallWatchdog
from stoker.serve.runtime.versions_in_use import VersionsInUse, versions_file
from stoker.serve.security.auth import Keys, read_keys
from stoker.serve.security.tls import Tls, read_tls
from stoker.serve.servables.catalog import Models, Watch
from stoker.serve.servables.config_file import ConfigFile
from stoker.serve.servables.model_config import ModelConfig, read_model_config
from stoker.serve.servables.servable import LoadOptions
from stoker.serve.text_files import read_text_file

_log = logging.getLogger(__name__)

_ROUTER_S = 1.0
"""Seconds between two reads of the rollouts' states."""


class Server:
    """A server with REST and gRPC interfaces, which share a dataplane and have threads of their own."""

    def __init__(
        self,
        config: ServeConfig,
        *,
        router: Router | None = None,
        extra: ExtraRoutes | None = None,
    ) -> None:
        """Bind both ports. Requests are answered only after `start`.

        Args:
            config: The configuration.
            router: Decides which version answers; None: the newest.
            extra: Answers further paths on the REST port; None: no further paths.

        Raises:
            ConfigError: a port is taken, or the file of models is invalid.
        """
        self.config = config
        self._config_watch: Watch | None = None
        self._router = router
        self._router_watch: Watch | None = None
        self._configs = _named_models(config)
        self._ready = threading.Event()
        self._runs = (
            StuckCallWatchdog(
                max_run_s=config.max_run_s, on_stuck=self._report_stuck, router=router
            )
            if config.max_run_s
            else None
        )
        self._metrics = metrics = ServeMetrics(
            config.worker_folder, worker=config.worker, max_series=config.max_series
        )
        options = self._load_options()
        self.models = Models(
            poll_s=config.poll_s, on_change=self._look_whether_ready, options=options
        )
        self.plane = DataPlane(
            self.models,
            metrics,
            check_method_names=config.check_method_names,
            allow_unavailable_labels=config.allow_unavailable_labels,
            tensor_content=config.tensor_content,
        )
        self.plane.router = router
        self._request_log = RequestLog(
            dropped=metrics.log_dropped, max_bytes=config.request_log_bytes
        )
        self.plane.on_answered = self._request_log.add
        self._quality = (
            PredictionQuality(metrics, self.models.folder_of, window_s=config.skew_window_s)
            if config.skew_window_s
            else None
        )
        self.plane.quality = self._quality
        self._access_log = _access_log(config, metrics.log_dropped)
        self._health = Health(self.plane)
        self._open(extra)

    def _load_options(self) -> LoadOptions:
        """Open the devices, and return the options for loading models."""
        config = self.config
        session = _session_config(config)
        open_devices(session)
        return LoadOptions(
            batching=config.batching,
            per_model_batching=config.per_model_batching,
            router=self._router,
            allow_ops=frozenset(config.allow_ops),
            metrics=self._metrics,
            in_use=_versions_in_use(config),
            runs=self._runs,
            warm_up=config.warm_up,
            warm_sizes=config.warm_sizes,
            warm_s=config.warm_s,
            session=session,
            unload_first=config.unload_first,
            litert_interpreters=config.litert_interpreters,
            warm_up_times=config.warm_up_times,
            saved_model_tags=config.saved_model_tags,
        )

    def _open(self, extra: ExtraRoutes | None) -> None:
        """Bind the ports, and create the two interfaces."""
        config = self.config
        keys = None if config.keys_file is None else read_keys(config.keys_file)
        tls = None if config.ssl_config_file is None else read_tls(config.ssl_config_file)
        self._bound = bound = _bind_all(config)
        self._socket = bound.rest
        self.rest_port: int = bound.rest.getsockname()[1]
        self.grpc_port: int = bound.grpc.getsockname()[1]
        try:
            self._grpc = make_grpc_server(
                self.plane,
                self._health,
                _grpc_options(config, bound, keys=keys, tls=tls, access_log=self._access_log),
            )
        except ConfigError:
            bound.close()
            raise
        rest = _rest_options(config, keys, self._access_log)
        self._app = RestApp(self.plane, dataclasses.replace(rest, extra=extra))
        self._rest = HttpServer(
            self._app,
            drain_s=config.drain_s,
            limits=config.http,
            tls=None if tls is None else tls.context(connections=config.http.connections),
            lane=InlinePredict(self._app),
        )
        self._rest_thread = threading.Thread(
            target=self._rest.run, args=([self._socket],), name="stoker-rest-loop"
        )

    def start(self) -> None:
        """Open the ports, and start to search for models. Does not wait."""
        self.listen()
        self.load()

    def listen(self) -> None:
        """Open both ports. Does not wait."""
        # The objects of TensorFlow's import are never freed, but every full garbage collection would visit them all.
        # The lists of a JSON image trigger a collection, which took most of the request's time.
        gc.collect()
        gc.freeze()
        self._socket.listen(BACKLOG)  # the kernel accepts connections even before the loop runs
        self._rest_thread.start()
        self._grpc.start()

    def load(self) -> None:
        """Start to search for models. Does not wait."""
        if self.config.root is not None:
            self.models.watch_root(self.config.root)
        else:
            self.models.configure(self._configs)
        if self._router is not None:
            self._router_watch = Watch(self._route, name="stoker-router", poll_s=_ROUTER_S)
        path, poll_s = self.config.model_config_file, self.config.model_config_poll_s
        if path is not None and poll_s:
            self._config_watch = Watch(
                ConfigFile(path, self._configs, self.models.configure).look,
                name="stoker-model-config",
                poll_s=poll_s,
            )

    def _route(self) -> None:
        if self._router is None:
            return
        read_s = self._router.refresh(self.models.served(), self.plane.running)
        for model, at_s in read_s.items():
            self._metrics.rollout_state_age.happened(
                at_s, model_name=model, worker=str(self.config.worker)
            )

    def _route_finally(self) -> None:
        """Report the last counts to the rollouts."""
        try:
            self._route()
        except OSError as error:
            _log.error("the last counts of the rollouts are lost: %s", error)

    def _report_stuck(self) -> None:
        if self.config.worker_folder is not None:
            stuck_file(self.config.worker_folder, self.config.worker, on_gpu=has_gpu()).touch()

    @property
    def is_stuck(self) -> bool:
        """Whether a model's run will not end, so that this process cannot end by itself."""
        return self._runs is not None and self._runs.stuck

    def wait_until_ready(self, timeout_s: float | None = None) -> bool:
        """Wait until the models can be called; return False after the time limit."""
        return self._ready.wait(timeout_s)

    def may_listen(self) -> bool:
        """Return whether the ports may open: the server is ready, or every model was tried and none is required.

        Raises:
            UserError: a model that must be loaded before the ports open cannot be loaded.
        """
        if self._ready.is_set():
            return True
        failed = "" if self.config.listen_when_tried else self.models.failed()
        if failed:
            raise UserError(
                f"Failed to start server. Error: {failed}",
                fix="Fix or remove the version, or serve the other models with --no-listen-when-loaded.",
            )
        return (self.config.listen_when_tried or self.models.root is not None) and (
            self.models.all_tried()
        )

    def ready(self) -> Ready:
        """Return the address, ports and models of this server."""
        return Ready(
            host=self.config.host,
            rest_port=self.rest_port,
            grpc_port=self.grpc_port,
            pid=os.getpid(),
            models=tuple(self.models.names()),
        )

    def stop(self) -> None:
        """Report "not ready", answer the requests in progress, and free all resources."""
        self.plane.drain()
        self._health.refresh()
        for watch in (self._config_watch, self._router_watch):
            if watch is not None:
                watch.stop()
                watch.join()
        time.sleep(self.config.lame_duck_s)  # time for load balancers to notice "not ready"
        self._rest.should_exit = True
        self._grpc.stop(self.config.drain_s).wait(self.config.drain_s + _CANCELLED_S)
        self._bound.remove()
        if self._rest_thread.ident is not None:
            self._rest_thread.join()
        else:
            self._socket.close()
        self._app.close()
        self._route_finally()
        self._request_log.close()
        if self._quality is not None:
            self._quality.close()
        if self._access_log is not None:
            self._access_log.close()
        if self._runs is not None:
            self._runs.close()
        if not self.is_stuck:  # else this would wait for a run that does not end
            self.models.close()

    def _look_whether_ready(self) -> None:
        self._health.refresh()
        if not self._ready.is_set() and not self.plane.unready():
            self._ready.set()


def _versions_in_use(config: ServeConfig) -> VersionsInUse:
    folder = config.worker_folder
    return VersionsInUse(None if folder is None else versions_file(folder, config.worker))


def _named_models(config: ServeConfig) -> tuple[ModelConfig, ...]:
    if config.model_config_file is not None:
        return read_model_config(config.model_config_file)
    return tuple(ModelConfig(name=name, base=base) for name, base in config.models.items())


def _session_config(config: ServeConfig) -> tf.compat.v1.ConfigProto:
    """Return the configuration of the models' sessions.

    Raises:
        ConfigError: the file with TensorFlow's settings is invalid.
    """
    path = config.session_config_file
    given = tf.compat.v1.ConfigProto()
    if path is not None:
        given = read_text_file(path, given, full_name="tensorflow.ConfigProto")
    if config.mixed_precision:
        given.graph_options.rewrite_options.auto_mixed_precision_onednn_bfloat16 = (
            rewriter_config_pb2.RewriterConfig.ON
        )
    return session_config(
        given,
        gpu_memory_fraction=config.per_process_gpu_memory_fraction,
        intra_op_threads=config.intra_op_threads,
        inter_op_threads=config.inter_op_threads,
    )


_CANCELLED_S = 1.0
"""Maximum wait for calls that were canceled at the end of the drain, seconds."""


def _access_log(config: ServeConfig, dropped: Counter) -> AccessLog | None:
    """Return the configured receivers of finished requests: access log, traces, or both; None: neither is on."""
    parts: list[AccessLog] = []
    if config.access_log:
        parts.append(AccessFile(config.access_log, dropped=dropped))
    if config.traces:
        from stoker.serve.tracing.traces import Traces

        scheme = "http" if config.ssl_config_file is None else "https"
        silent = {*PROBES, *forms_of(config.metrics_path or METRICS_PATH)}
        parts.append(Traces(dropped=dropped, scheme=scheme, silent=silent))
    return CombinedLog(tuple(parts)) if len(parts) > 1 else next(iter(parts), None)


def _rest_options(
    config: ServeConfig, keys: Keys | None, access_log: AccessLog | None
) -> RestOptions:
    return RestOptions(
        workers=config.rest_workers,
        max_body_bytes=config.max_body_bytes,
        max_held_bytes=max(config.max_held_bytes, config.max_body_bytes),
        max_in_flight=config.max_in_flight,
        timeout_s=config.rest_timeout_s,
        keys=keys,
        metrics_path=config.metrics_path,
        access_log=access_log,
        cors=config.cors,
    )


def _grpc_options(
    config: ServeConfig,
    bound: _Bound,
    *,
    keys: Keys | None,
    tls: Tls | None,
    access_log: AccessLog | None,
) -> GrpcOptions:
    return GrpcOptions(
        bound=bound.grpc,
        local=bound.local,
        arguments=config.grpc_channel_arguments,
        workers=config.grpc_workers,
        max_in_flight=config.max_in_flight,
        max_held_bytes=config.max_held_bytes,
        limits=config.http,
        keys=keys,
        tls=tls,
        access_log=access_log,
        profiler=config.profiler,
    )


@dataclass(kw_only=True)
class _Bound:
    """The sockets of a server."""

    rest: socket.socket
    grpc: socket.socket
    local: socket.socket | None = None
    path: Path = Path()
    """Path of the Unix socket."""

    inode: int = 0
    """Inode of the socket file."""

    def close(self) -> None:
        """Close the sockets, and remove the socket file if it still belongs to this server."""
        for each in (self.rest, self.grpc):
            each.close()
        self.remove()

    def remove(self) -> None:
        """Remove the socket file, unless another server has created its own file at the same path."""
        if self.local is None:
            return
        with contextlib.suppress(OSError):
            if self.path.stat().st_ino == self.inode:
                self.path.unlink()
        self.local.close()


def _bind_all(config: ServeConfig) -> _Bound:
    """Return the bound sockets of REST and gRPC.

    Raises:
        ConfigError: a port or a path is taken.
    """
    if config.listeners is not None:
        rest, grpc = map(inherited_socket, config.listeners)
    else:
        shared = config.worker_folder is not None
        rest = _bind(config.host, config.rest_port, name="REST", shared=shared)
        try:
            grpc = _bind(config.host, config.grpc_port, name="gRPC", shared=shared)
        except ConfigError:
            rest.close()
            raise
    bound = _Bound(rest=rest, grpc=grpc)
    path = Path(config.grpc_socket_path) if config.grpc_socket_path else None
    if path is not None:
        try:
            bound.local = bound_path(path)
            bound.path, bound.inode = path, path.stat().st_ino
        except OSError as error:
            bound.close()
            raise ConfigError(
                "--grpc_socket_path must be a path where a socket can be created",
                got=Plain(f"{path} ({error.strerror})"),
            ) from error
    return bound


_FLAGS = {"REST": "--rest_api_port", "gRPC": "--port"}


def _bind(host: str, port: int, *, name: str, shared: bool) -> socket.socket:
    try:
        return bound_socket(host, port, shared=shared)
    except OSError as error:
        raise ConfigError(
            f"the {name} port must be free on this machine",
            got=Plain(f"{host}:{port} ({error.strerror})"),
            fix=f"Choose another {_FLAGS[name]}, or 0 for a free one.",
        ) from error
