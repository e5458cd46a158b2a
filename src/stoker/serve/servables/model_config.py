"""Settings of the served models and their versions: TensorFlow Serving's `ModelServerConfig`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from stoker.core.errors import ConfigError, Plain
from stoker.registry.repository import MAX_VERSION, check_is_folder, checked_name
from stoker.serve.text_files import read_text_file

if TYPE_CHECKING:
    from tensorflow_serving.config import model_server_config_pb2

_FULL_NAME = "tensorflow.serving.ModelServerConfig"
_TENSORFLOW = 1
"""`ModelType.TENSORFLOW`, a value of the deprecated field that `model_platform` replaced."""


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionPolicy:
    """Selects the versions on disk that are served.

    Source: TensorFlow Serving, `ServableVersionPolicy`.
    """

    kind: Literal["latest", "all", "specific"] = "latest"
    """Whether the newest versions are served, all of them, or the named ones."""

    count: int = 1
    """Number of the newest versions that are served; only for "latest"."""

    versions: tuple[int, ...] = ()
    """Numbers of the named versions; only for "specific"."""

    def candidates(self, found: Iterable[int]) -> list[int]:
        """Return the versions that may be served, newest first."""
        newest_first = sorted(found, reverse=True)
        if self.kind == "specific":
            return [version for version in newest_first if version in self.versions]
        return newest_first

    def is_met(self, served: int) -> bool:
        """Return whether this number of served versions is all that the policy selects."""
        return self.kind == "latest" and served >= self.count


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestLogConfig:
    """The settings of a model's request log.

    Source: TensorFlow Serving, `LoggingConfig`.
    """

    prefix: str
    """Beginning of the paths of the log's files."""

    rate: float
    """Share of the requests that are logged, 0..1."""

    def __post_init__(self) -> None:
        if not Path(self.prefix).is_absolute():
            raise ConfigError("filename_prefix must be an absolute path", got=self.prefix)
        if not 0.0 <= self.rate <= 1.0:
            raise ConfigError("sampling_rate must lie in 0..1", got=self.rate)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The settings of one model."""

    name: str
    """The model's name for clients."""

    base: Path
    """The folder of its numbered versions."""

    policy: VersionPolicy = field(default_factory=VersionPolicy)
    """Selects the versions that are served."""

    labels: Mapping[str, int] = field(default_factory=dict)
    """Label -> version; in addition to the labels in the model's folder."""

    request_log: RequestLogConfig | None = None
    """The settings of the request log; None: no request is logged."""

    def __post_init__(self) -> None:
        checked_name(self.name)
        for label, version in self.labels.items():
            checked_name(label)
            _check_version(version, place=f"label {label!r} of model {self.name!r}")
        for version in self.policy.versions:
            _check_version(version, place=f"the versions of model {self.name!r}")
        if self.policy.kind == "specific" and not self.policy.versions:
            raise ConfigError(
                f"model {self.name!r} must name the versions of its policy 'specific'",
                got=Plain("none"),
            )


def read_model_config(path: Path) -> tuple[ModelConfig, ...]:
    """Read TensorFlow Serving's `model_config_file`.

    Raises:
        ConfigError: the file does not exist, has another form, or names a model that cannot be served.
    """
    from tensorflow_serving.config import model_server_config_pb2

    empty = model_server_config_pb2.ModelServerConfig()
    return models_of(read_text_file(path, empty, full_name=_FULL_NAME))


def models_of(config: model_server_config_pb2.ModelServerConfig) -> tuple[ModelConfig, ...]:
    """Return the models of a message.

    Raises:
        ConfigError: the message names a model that cannot be served.
    """
    if config.WhichOneof("config") == "custom_model_config":
        raise ConfigError(
            "ServerModelConfig type not supported. Only ModelConfigList is currently supported",
            got=Plain("custom_model_config"),
        )
    models = tuple(_model(found) for found in config.model_config_list.config)
    if not models:
        raise ConfigError("a model configuration must have at least one model", got=Plain("none"))
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError("Illegal to list model multiple times in config list", got=name)
    return models


def _model(found: model_server_config_pb2.ModelConfig) -> ModelConfig:
    if not found.name:
        raise ConfigError("every model must have a name", got=Plain(f"none for {found.base_path}"))
    if found.model_platform not in ("", "tensorflow") or found.model_type not in (0, _TENSORFLOW):
        raise ConfigError(
            f"model {found.name!r} must be of the platform 'tensorflow'", got=found.model_platform
        )
    base = Path(found.base_path.removeprefix("file://"))
    check_is_folder(base)
    if not base.is_absolute():
        raise ConfigError(
            f"Expected model {found.name} to have an absolute path or URI", got=found.base_path
        )
    return ModelConfig(
        name=found.name,
        base=base,
        policy=_policy(found.model_version_policy),
        labels=dict(found.version_labels),
        request_log=_request_log(found) if found.HasField("logging_config") else None,
    )


def _request_log(found: model_server_config_pb2.ModelConfig) -> RequestLogConfig:
    config = found.logging_config
    collector = config.log_collector_config
    if config.HasField("custom_logging_config") or config.sampling_config.per_task_sampling_configs:
        raise ConfigError(
            f"logging_config of model {found.name!r} must have log_collector_config and "
            "sampling_config.sampling_rate only",
            got=Plain("more"),
        )
    if collector.type not in _COLLECTORS:
        raise ConfigError(
            f"the log collector of model {found.name!r} must be of the type 'file'",
            got=collector.type,
        )
    return RequestLogConfig(
        prefix=collector.filename_prefix, rate=config.sampling_config.sampling_rate
    )


_COLLECTORS = ("", "file")
"""Accepted types of log collectors. TensorFlow Serving includes no collector; its users add them as plugins."""


def _policy(found: object) -> VersionPolicy:
    choice = found.WhichOneof("policy_choice")  # type: ignore[attr-defined] # a generated message
    if choice == "all":
        return VersionPolicy(kind="all")
    if choice == "specific":
        versions = tuple(found.specific.versions)  # type: ignore[attr-defined] # a generated message
        return VersionPolicy(kind="specific", versions=versions)
    count = found.latest.num_versions if choice == "latest" else 1  # type: ignore[attr-defined] # a generated message
    return VersionPolicy(count=count or 1)


def _check_version(version: int, *, place: str) -> None:
    if not 0 <= version <= MAX_VERSION:
        raise ConfigError(f"{place} must be a version's number, 0 or more", got=version)
