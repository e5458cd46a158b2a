"""`stoker serve`: answer over REST and gRPC from a folder of models."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from stoker.app.quiet import import_tensorflow
from stoker.core.errors import ConfigError, Plain

if TYPE_CHECKING:
    from stoker.serve.batching.config import BatchingConfig
    from stoker.serve.config import ServeConfig
    from stoker.serve.ready import Ready

_TRUTH = {"true": True, "1": True, "t": True, "false": False, "0": False, "f": False}


class ServeCommand(TyperCommand):
    """Takes flags also as TensorFlow Serving does: `--enable_batching=true`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Turn `--flag=true` into `--flag`, and leave `--flag=false` out, for flags of that kind."""
        flags = {
            name
            for option in self.params
            if getattr(option, "is_flag", False)
            for name in option.opts
        }
        return super().parse_args(ctx, [plain for arg in args for plain in _plain(arg, flags)])


def _plain(argument: str, flags: set[str]) -> list[str]:
    name, equals, value = argument.partition("=")
    truth = _TRUTH.get(value.lower())
    if not equals or name not in flags or truth is None:
        return [argument]
    return [name] if truth else []


def _option(*names: str, help_text: str) -> Any:
    """An option under its own name and under TensorFlow Serving's, which has underscores."""
    return typer.Option(*names, help=help_text)


def serve(
    folder: Annotated[
        Path | None,
        typer.Argument(
            help="An experiment, a repository of models, or one model's folder of versions."
        ),
    ] = None,
    model_name: Annotated[
        str | None, _option("--model-name", "--model_name", help_text="What one model is called.")
    ] = None,
    model_base_path: Annotated[
        Path | None,
        _option("--model-base-path", "--model_base_path", help_text="Its folder of versions."),
    ] = None,
    model_config_file: Annotated[
        Path | None,
        _option(
            "--model-config-file",
            "--model_config_file",
            help_text="TensorFlow Serving's file of models, versions and labels.",
        ),
    ] = None,
    model_config_poll_s: Annotated[
        float,
        _option(
            "--model-config-poll-s",
            "--model_config_file_poll_wait_seconds",
            help_text="Seconds between two looks at that file; 0 reads it once.",
        ),
    ] = 0.0,
    allow_unavailable_labels: Annotated[
        bool,
        _option(
            "--allow-unavailable-labels",
            "--allow_version_labels_for_unavailable_models",
            help_text="A reload may give a new label to a version that is not loaded.",
        ),
    ] = False,
    batching: Annotated[
        bool,
        typer.Option("--batching/--no-batching", help="Run requests that wait for a model as one."),
    ] = True,
    enable_batching: Annotated[
        bool,
        typer.Option("--enable_batching", help="TensorFlow Serving's flag; it is so by default."),
    ] = False,
    batching_parameters_file: Annotated[
        Path | None,
        _option(
            "--batching-parameters-file",
            "--batching_parameters_file",
            help_text="TensorFlow Serving's BatchingParameters.",
        ),
    ] = None,
    per_model_batching: Annotated[
        bool,
        _option(
            "--per-model-batching",
            "--enable_per_model_batching_parameters",
            help_text="Read batching_params.pbtxt in a version's folder.",
        ),
    ] = False,
    check_method_names: Annotated[
        bool,
        _option(
            "--check-method-names",
            "--enable_signature_method_name_check",
            help_text="Classify and regress only by signatures of that method name.",
        ),
    ] = False,
    max_in_flight: Annotated[
        int,
        typer.Option("--max-in-flight", help="Requests under way; more get 503."),
    ] = 1024,
    max_body_mb: Annotated[
        int, typer.Option("--max-body-mb", help="Largest REST body, MiB; a larger one gets 413.")
    ] = 64,
    rest_api_timeout_in_ms: Annotated[
        int,
        _option(
            "--rest-api-timeout-in-ms",
            "--rest_api_timeout_in_ms",
            help_text="Longest that a REST request waits for its model.",
        ),
    ] = 30_000,
    rest_api_num_threads: Annotated[
        int,
        _option(
            "--rest-api-num-threads",
            "--rest_api_num_threads",
            help_text="REST requests that are worked on at once.",
        ),
    ] = 8,
    grpc_num_threads: Annotated[
        int, typer.Option("--grpc-num-threads", help="gRPC calls that are worked on at once.")
    ] = 8,
    monitoring_config_file: Annotated[
        Path | None,
        _option(
            "--monitoring-config-file",
            "--monitoring_config_file",
            help_text="TensorFlow Serving's MonitoringConfig.",
        ),
    ] = None,
    ssl_config_file: Annotated[
        Path | None,
        _option(
            "--ssl-config-file",
            "--ssl_config_file",
            help_text="TensorFlow Serving's SSLConfig: TLS on both ports.",
        ),
    ] = None,
    keys_file: Annotated[
        Path | None,
        typer.Option("--keys-file", help="YAML of bearer tokens and API keys with their roles."),
    ] = None,
    allow_unauthenticated: Annotated[
        bool,
        typer.Option("--allow-unauthenticated", help="Let others than this machine in without."),
    ] = False,
    allow_ops: Annotated[
        list[str] | None,
        typer.Option("--allow-ops", help="An operation that models may have; may be repeated."),
    ] = None,
    workers: Annotated[
        int, typer.Option("--workers", help="Processes that share the two ports.")
    ] = 1,
    shared_ports: Annotated[bool, typer.Option("--shared-ports", hidden=True)] = False,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    rest_api_port: Annotated[
        int, _option("--rest-api-port", "--rest_api_port", help_text="REST; 0 takes a free port.")
    ] = 8501,
    port: Annotated[int, typer.Option("--port", help="gRPC; 0 takes a free port.")] = 8500,
    grpc_socket_path: Annotated[
        str,
        _option(
            "--grpc-socket-path",
            "--grpc_socket_path",
            help_text="A Unix socket for gRPC beside it.",
        ),
    ] = "",
    grpc_channel_arguments: Annotated[
        str,
        _option(
            "--grpc-channel-arguments",
            "--grpc_channel_arguments",
            help_text="gRPC's own settings: NAME=VALUE,NAME=VALUE.",
        ),
    ] = "",
    poll_s: Annotated[
        float,
        _option(
            "--poll-s",
            "--file-system-poll-wait-seconds",
            "--file_system_poll_wait_seconds",
            help_text="Seconds between two looks for new versions.",
        ),
    ] = 1.0,
    ready_file: Annotated[
        Path | None,
        _option("--ready-file", "--ready_file", help_text="Written with the real ports."),
    ] = None,
    stop_with_stdin: Annotated[
        bool,
        typer.Option("--stop-with-stdin", help="Stop, as by SIGTERM, when standard input ends."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Say where it listens as JSON.")] = False,
) -> None:
    """Serve models in TensorFlow Serving's protocols until SIGTERM."""
    config = configured(
        folder if model_base_path is None else model_base_path,
        model_name=model_name,
        model_config_file=model_config_file,
        both=folder is not None and model_base_path is not None,
        model_config_poll_s=model_config_poll_s,
        allow_unavailable_labels=allow_unavailable_labels,
        batching=batching_of(batching_parameters_file, batching=batching, asked=enable_batching),
        per_model_batching=per_model_batching,
        check_method_names=check_method_names,
        max_in_flight=max_in_flight,
        max_body_bytes=max_body_mb << 20,
        rest_timeout_s=rest_api_timeout_in_ms / 1000,
        rest_workers=rest_api_num_threads,
        grpc_workers=grpc_num_threads,
        metrics_path=metrics_path_of(monitoring_config_file),
        ssl_config_file=ssl_config_file,
        keys_file=keys_file,
        allow_unauthenticated=allow_unauthenticated,
        allow_ops=tuple(allow_ops or ()),
        workers=workers,
        shared_ports=shared_ports,
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
    if config.workers > 1:
        from stoker.serve.workers import run_workers

        command = [sys.executable, "-m", "stoker", *sys.argv[1:]]
        run_workers(config, command, lambda ready: _say(ready, as_json=as_json))
        return
    # Only once the flags are known to be right: the import takes seconds.
    import_tensorflow()
    from stoker.serve.server import run_server

    run_server(config, lambda ready: _say(ready, as_json=as_json))


def configured(
    folder: Path | None,
    *,
    model_name: str | None,
    model_config_file: Path | None = None,
    both: bool = False,
    **options: Any,
) -> ServeConfig:
    """The configuration that the flags ask for.

    Raises:
        ConfigError: no folder was named, or two.
        UserError: the folder cannot be served.
    """
    from stoker.serve.config import ServeConfig, what_to_serve

    if model_config_file is not None:
        if folder is not None or model_name is not None:
            raise ConfigError(
                "--model_config_file must stand alone, it names the models",
                got=Plain("a folder or a model's name beside it"),
            )
        return ServeConfig(model_config_file=model_config_file, **options)
    if folder is None or both:
        raise ConfigError(
            "one folder must be served",
            got=Plain("two" if both else "none"),
            fix="Name a repository, or give --model_name and --model_base_path, "
            "or --model_config_file.",
        )
    if (folder / EXPERIMENT_FILE).is_file():
        folder, model_name = _of_experiment(folder, model_name)
    config = what_to_serve(folder, model_name=model_name)
    return dataclasses.replace(config, **options)


def batching_of(parameters: Path | None, *, batching: bool, asked: bool) -> BatchingConfig:
    """How requests are joined, by the flags.

    Raises:
        ConfigError: the flags contradict each other, or the file is wrong.
    """
    from stoker.serve.batching.config import BatchingConfig, read_batching_parameters

    if not batching and (asked or parameters is not None):
        raise ConfigError(
            "--no-batching must not stand beside --enable_batching or --batching_parameters_file",
            got=Plain("both"),
        )
    if parameters is not None:
        return read_batching_parameters(parameters)
    return BatchingConfig(enabled=batching)


def channel_arguments(text: str) -> dict[str, str | int]:
    """GRPC's settings as TensorFlow Serving takes them: `NAME=VALUE,NAME=VALUE`.

    Raises:
        ConfigError: a part is not of that form.
    """
    found: dict[str, str | int] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or not name.startswith("grpc."):
            raise ConfigError(
                "--grpc_channel_arguments must be grpc.NAME=VALUE, parted by commas", got=part
            )
        found[name] = int(value) if value.lstrip("-").isdecimal() else value
    return found


def metrics_path_of(monitoring: Path | None) -> str | None:
    """Where the metrics are, by TensorFlow Serving's file; at its usual place without one.

    Raises:
        ConfigError: the file is wrong.
    """
    from stoker.serve.config import read_metrics_path
    from stoker.serve.rest.limits import METRICS_PATH

    return METRICS_PATH if monitoring is None else read_metrics_path(monitoring)


def _stop_with_stdin() -> None:
    while sys.stdin.buffer.read(1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


EXPERIMENT_FILE = "stoker.yaml"
"""What makes a folder an experiment, whose models are served."""


def _of_experiment(folder: Path, model_name: str | None) -> tuple[Path, str]:
    from stoker.app.experiment import load_experiment

    experiment = load_experiment(folder)
    name = experiment.model_name
    if not (experiment.models_root / name).is_dir():
        raise ConfigError(
            f"{experiment.models_root / name} must hold a version to be served",
            got=Plain("nothing was pushed yet"),
            fix=f"Run `stoker run {folder}` first.",
        )
    return experiment.models_root / name, model_name or name


def _say(ready: Ready, *, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(ready.as_json()))
        return
    models = ", ".join(ready.models)
    typer.echo(
        f"serving {models} at http://{ready.host}:{ready.rest_port}/v1/models "
        f"and gRPC {ready.host}:{ready.grpc_port}"
    )
