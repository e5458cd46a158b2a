"""Builds the server configuration from the flags of `stoker serve`."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.core.errors import ConfigError, Plain

if TYPE_CHECKING:
    from stoker.serve.batching.config import BatchingConfig
    from stoker.serve.config import ServeConfig


def configured(
    folder: Path | None,
    *,
    model_name: str | None,
    model_config_file: Path | None = None,
    both: bool = False,
    **options: Any,
) -> ServeConfig:
    """Return the configuration for the flags.

    Raises:
        ConfigError: the flags name no folder, or two.
        UserError: the folder cannot be served.
    """
    from stoker.serve.config import ServeConfig, what_to_serve

    if model_config_file is not None:
        if folder is not None:
            raise ConfigError(
                "--model_config_file names the models, so no folder can be served with it",
                got=str(folder),
                fix="Leave out the folder, or add its models to the file.",
            )
        return ServeConfig(model_config_file=model_config_file, **options)
    if folder is None or both:
        raise ConfigError(
            "the flags must name exactly one folder to serve",
            got=Plain("two" if both else "none"),
            fix="Name a repository, or give --model_name and --model_base_path, "
            "or --model_config_file.",
        )
    if (folder / EXPERIMENT_FILE).is_file():
        folder, model_name = _of_experiment(folder, model_name)
    config = what_to_serve(folder, model_name=model_name)
    return dataclasses.replace(config, **options)


def batching_of(parameters: Path | None, *, batching: bool, requested: bool) -> BatchingConfig:
    """Return the batching configuration that the flags set.

    Raises:
        ConfigError: the flags contradict each other, or the file is invalid.
    """
    from stoker.serve.batching.config import BatchingConfig, read_batching_parameters

    if not batching and (requested or parameters is not None):
        raise ConfigError(
            "--no-batching must not be combined with --enable_batching or --batching_parameters_file",
            got=Plain("both"),
        )
    if parameters is not None:
        return read_batching_parameters(parameters)
    return BatchingConfig(enabled=batching)


def channel_arguments(text: str) -> dict[str, str | int]:
    """Parse gRPC channel arguments in TensorFlow Serving's form: `NAME=VALUE,NAME=VALUE`.

    Raises:
        ConfigError: a part does not have this form.
    """
    found: dict[str, str | int] = {}
    for part in filter(None, text.split(",")):
        name, equals, value = part.partition("=")
        if not equals or not name.startswith("grpc."):
            raise ConfigError(
                "--grpc_channel_arguments must be grpc.NAME=VALUE, separated by commas", got=part
            )
        found[name] = int(value) if value.lstrip("-").isdecimal() else value
    return found


def metrics_path_of(monitoring: Path | None) -> str | None:
    """Return the path of the metrics in TensorFlow Serving's MonitoringConfig file; without a file, the default path.

    Raises:
        ConfigError: the file is invalid.
    """
    from stoker.serve.config import read_metrics_path
    from stoker.serve.limits import METRICS_PATH

    return METRICS_PATH if monitoring is None else read_metrics_path(monitoring)


EXPERIMENT_FILE = "stoker.yaml"
"""A folder with this file is an experiment; the versions that it pushed are served."""


def _of_experiment(folder: Path, model_name: str | None) -> tuple[Path, str]:
    from stoker.app.experiment import load_experiment

    experiment = load_experiment(folder)
    name = experiment.model_name
    if not (experiment.models_root / name).is_dir():
        raise ConfigError(
            f"{experiment.models_root / name} must hold a version to serve",
            got=Plain("no version was pushed yet"),
            fix=f"Run `stoker run {folder}` first.",
        )
    return experiment.models_root / name, model_name or name
