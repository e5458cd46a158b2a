"""`stoker serve`: serves a folder of models over REST and gRPC."""

from __future__ import annotations

import functools
import json
import logging
import os
import signal
import sys
import threading
import time
from importlib import metadata
from typing import TYPE_CHECKING

import typer

from stoker import __version__
from stoker.app.import_tensorflow import import_tensorflow
from stoker.cli.options import Gpus, use_gpus
from stoker.cli.serve import command_line, flags
from stoker.cli.serve.configuration import (
    batching_of,
    channel_arguments,
    configured,
    metrics_path_of,
)
from stoker.cluster.limits import usable_cores

if TYPE_CHECKING:
    from stoker.serve.process.ready import Ready


ServeCommand = command_line.ServeCommand


def serve(
    context: typer.Context,
    folder: flags.Folder = None,
    model_name: flags.ModelName = None,
    model_base_path: flags.ModelBasePath = None,
    model_config_file: flags.ModelConfigFile = None,
    model_config_poll_s: flags.ModelConfigPollS = 0.0,
    allow_unavailable_labels: flags.AllowUnavailableLabels = False,
    batching: flags.Batching = True,
    enable_batching: flags.EnableBatching = False,
    batching_parameters_file: flags.BatchingParametersFile = None,
    per_model_batching: flags.PerModelBatching = False,
    check_method_names: flags.CheckMethodNames = False,
    max_in_flight: flags.MaxInFlight = 1024,
    max_body_mb: flags.MaxBodyMb = 64,
    rest_api_timeout_in_ms: flags.RestApiTimeoutInMs = 30_000,
    rest_api_num_threads: flags.RestApiNumThreads = 8,
    grpc_num_threads: flags.GrpcNumThreads = 8,
    intra_op_threads: flags.IntraOpThreads = 0,
    inter_op_threads: flags.InterOpThreads = 0,
    session_threads: flags.SessionThreads = 0,
    session_config_file: flags.SessionConfigFile = None,
    tensor_content: flags.TensorContent = False,
    prefer_tflite: flags.PreferTflite = False,
    num_tflite_pools: flags.NumTflitePools = 0,
    enable_profiler: flags.EnableProfiler = True,
    enable_cors: flags.EnableCors = False,
    monitoring_config_file: flags.MonitoringConfigFile = None,
    ssl_config_file: flags.SslConfigFile = None,
    enable_model_warmup: flags.EnableModelWarmup = True,
    warm_up_times: flags.WarmUpTimes = 1,
    saved_model_tags: flags.SavedModelTags = "serve",
    mixed_precision: flags.MixedPrecision = "",
    warm_up_sizes: flags.WarmUpSizes = "auto",
    warm_up_s: flags.WarmUpS = 300.0,
    gpu_memory_fraction: flags.GpuMemoryFraction = 0.0,
    unload_first: flags.UnloadFirst = False,
    keys_file: flags.KeysFile = None,
    allow_unauthenticated: flags.AllowUnauthenticated = False,
    allow_ops: flags.AllowOps = None,
    max_run_s: flags.MaxRunS = 120.0,
    max_memory_mb: flags.MaxMemoryMb = 0,
    access_log: flags.AccessLog = "",
    traces: flags.Traces = False,
    gate_folder: flags.GateFolder = None,
    request_log_mb: flags.RequestLogMb = 1024,
    max_series: flags.MaxSeries = 20_000,
    skew_window_s: flags.SkewWindowS = 300.0,
    workers: flags.Workers = 1,
    worker_folder: flags.WorkerFolder = None,
    worker: flags.Worker = 0,
    listeners: flags.Listeners = None,
    listen_when_loaded: flags.ListenWhenLoaded = True,
    listen_when_tried: flags.ListenWhenTried = False,
    host: flags.Host = "127.0.0.1",
    rest_api_port: flags.RestApiPort = 8501,
    port: flags.Port = 8500,
    grpc_socket_path: flags.GrpcSocketPath = "",
    grpc_channel_arguments: flags.GrpcChannelArguments = "",
    poll_s: flags.PollS = 1.0,
    ready_file: flags.ReadyFile = None,
    stop_with_stdin: flags.StopWithStdin = False,
    gpus: Gpus = None,
    version: flags.Version = False,
    as_json: flags.AsJson = False,
) -> None:
    """Serve models over TensorFlow Serving's REST and gRPC."""
    if version:
        typer.echo(f"Stoker: {__version__}\nTensorFlow Library: {metadata.version('tensorflow')}")
        return
    use_gpus(gpus)
    config = configured(
        folder if model_base_path is None else model_base_path,
        model_name=model_name,
        model_config_file=model_config_file,
        both=folder is not None and model_base_path is not None,
        model_config_poll_s=model_config_poll_s,
        allow_unavailable_labels=allow_unavailable_labels,
        batching=batching_of(
            batching_parameters_file, batching=batching, requested=enable_batching
        ),
        per_model_batching=per_model_batching,
        check_method_names=check_method_names,
        max_in_flight=max_in_flight,
        max_body_bytes=max_body_mb << 20,
        rest_timeout_s=rest_api_timeout_in_ms / 1000,
        rest_workers=rest_api_num_threads,
        grpc_workers=grpc_num_threads,
        intra_op_threads=intra_op_threads or session_threads,
        inter_op_threads=inter_op_threads or session_threads,
        session_config_file=session_config_file,
        tensor_content=tensor_content,
        litert_interpreters=(num_tflite_pools or usable_cores()) if prefer_tflite else 0,
        profiler=enable_profiler,
        cors=enable_cors,
        metrics_path=metrics_path_of(monitoring_config_file),
        ssl_config_file=ssl_config_file,
        warm_up=enable_model_warmup,
        warm_up_times=warm_up_times,
        saved_model_tags=tuple(filter(None, saved_model_tags.split(","))) or ("serve",),
        mixed_precision=mixed_precision,
        warm_sizes=warm_up_sizes,
        warm_s=warm_up_s,
        per_process_gpu_memory_fraction=gpu_memory_fraction,
        unload_first=unload_first,
        keys_file=keys_file,
        allow_unauthenticated=allow_unauthenticated,
        allow_ops=tuple(allow_ops or ()),
        max_run_s=max_run_s,
        max_memory_bytes=max_memory_mb << 20,
        access_log=access_log,
        traces=traces,
        request_log_bytes=request_log_mb << 20,
        max_series=max_series,
        skew_window_s=skew_window_s,
        workers=workers,
        worker_folder=worker_folder,
        worker=worker,
        listeners=listeners,
        listen_when_loaded=listen_when_loaded,
        listen_when_tried=listen_when_tried,
        host=host,
        rest_port=rest_api_port,
        grpc_port=port,
        grpc_socket_path=grpc_socket_path,
        grpc_channel_arguments=channel_arguments(grpc_channel_arguments),
        poll_s=poll_s,
        ready_file=ready_file,
    )
    if stop_with_stdin:
        threading.Thread(target=_stop_with_stdin, daemon=True).start()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    logging.getLogger().setLevel(logging.INFO)  # with --log-json, `basicConfig` does nothing
    name = f"{os.uname().nodename}-{os.getpid()}-{time.time_ns():x}"
    from stoker.rollout.control.supervisor import Controllers, RolloutSupervisor, make_controller

    make = functools.partial(make_controller, gate_folder=gate_folder)
    if config.is_supervised:
        from stoker.serve.process.workers import WorkerEndedError, run_workers

        given = context.meta[command_line.ARGUMENTS]
        command = [sys.executable, "-m", "stoker", "serve", *given]
        try:
            run_workers(
                config,
                command,
                lambda ready: _say(ready, as_json=as_json),
                supervisor=RolloutSupervisor(server=name, make=make),
            )
        except WorkerEndedError as error:  # the error was already reported
            raise typer.Exit(error.code) from error
        return
    # Imported only after the flags were checked, because the import takes seconds.
    import_tensorflow()
    from stoker.rollout.rest import RolloutRoutes
    from stoker.rollout.routing.router import RolloutRouter
    from stoker.rollout.shadow.stage import ShadowOptions
    from stoker.serve.process.main import run_server

    # A worker process has no controllers: its supervisor decides about rollouts.
    controllers = Controllers(make) if config.worker_folder is None else None
    shadow = ShadowOptions(allow_ops=config.allow_ops, saved_model_tags=config.saved_model_tags)
    run_server(
        config,
        lambda ready: _say(ready, as_json=as_json),
        router=RolloutRouter(
            server=name, folder=config.worker_folder, controllers=controllers, shadow=shadow
        ),
        extra=RolloutRoutes(gate_folder=gate_folder),
    )


def _stop_with_stdin() -> None:
    # unbuffered: a thread that holds sys.stdin's lock would block Python's exit
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _say(ready: Ready, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(ready.as_json()))
        return
    models = ", ".join(ready.models)
    typer.echo(
        f"serving {models} at http://{ready.host}:{ready.rest_port}/v1/models "
        f"and gRPC {ready.host}:{ready.grpc_port}"
    )
