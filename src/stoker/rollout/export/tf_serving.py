"""A split for TensorFlow Serving, which has labels instead: `stable`, and `canary` for the candidate.

Labels split nothing by themselves: a client, or a gateway, chooses one of them.
Source: tensorflow/serving, model_server_config.proto and `ServerCore::ReloadConfig`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stoker.client.grpc_client import GrpcClient
from stoker.client.messages import MODEL_STATUS, RELOAD_CONFIG, message
from stoker.client.model_client import RefusedError
from stoker.core.errors import ConfigError, Plain, UserError
from stoker.rollout.export.split import ExportedSplit
from stoker.rollout.state.state import ACTIVE, Phase

if TYPE_CHECKING:
    from tensorflow_serving.config import model_server_config_pb2

STABLE, CANARY = "stable", "canary"

_AVAILABLE = 30
"""`ModelVersionStatus.State.AVAILABLE`."""

_END = 50
"""`ModelVersionStatus.State.END`: unloaded, or it could not be loaded."""

_POLL_S = 0.5
"""Interval in which the states are read, seconds."""


def labels_of(split: ExportedSplit) -> dict[str, int]:
    """Label -> version. `canary` is the stable version without a candidate, so that it always answers."""
    state = split.state
    candidate = state.candidate if state.phase in ACTIVE else state.stable
    return {STABLE: state.stable, CANARY: candidate}


def model_server_config(
    split: ExportedSplit, *, base_path: str, others: Path | None = None, now_s: float
) -> model_server_config_pb2.ModelServerConfig:
    """The configuration of a TensorFlow Serving server.

    Args:
        split: of a model.
        base_path: folder of the model's versions, as the server sees it.
        others: a `model_config_file`, whose other models are kept; None if it has none.
        now_s: seconds since the epoch; a version to go back to stays loaded for a while.

    Raises:
        ConfigError: `others` is not a valid `model_config_file`.
    """
    from tensorflow_serving.config import model_server_config_pb2

    config = model_server_config_pb2.ModelServerConfig()
    if others is not None:
        _read(others, config)
    models = config.model_config_list.config
    kept = [each for each in models if each.name != split.model]
    mine = next((each for each in models if each.name == split.model), None)
    entry = model_server_config_pb2.ModelConfig(name=split.model, model_platform="tensorflow")
    if mine is not None:
        entry.CopyFrom(mine)  # with its own logging and labels
    entry.base_path = base_path
    entry.model_version_policy.specific.versions[:] = _loaded(split, now_s=now_s)
    for label, version in labels_of(split).items():
        entry.version_labels[label] = version
    del models[:]
    models.extend([*kept, entry])
    return config


def config_text(config: model_server_config_pb2.ModelServerConfig) -> str:
    """The configuration as a `model_config_file`."""
    from google.protobuf import text_format

    return text_format.MessageToString(config)


def reload_server(
    client: GrpcClient,
    split: ExportedSplit,
    config: model_server_config_pb2.ModelServerConfig,
    *,
    limit_s: float,
) -> None:
    """Make a server use a configuration: first the versions, then the labels, once the versions are loaded.

    TensorFlow Serving refuses a label for a version that it has not loaded, and it checks labels before it loads
    anything. So the first call has the labels of loaded versions alone.

    Args:
        client: of the server.
        split: of the model.
        config: of all models of the server. Those that are not in it are unloaded.
        limit_s: longest that the versions may take to load, seconds.

    Raises:
        UserError: a version could not be loaded, or not in time; labels keep their versions, as far as
            these are loaded.
        CallError: the server does not answer, or refuses the configuration.
    """
    wanted = set(labels_of(split).values())
    loaded = {
        version for version, state in _states(client, split.model).items() if state[0] == _AVAILABLE
    }
    if not wanted <= loaded:
        first = type(config)()
        first.CopyFrom(config)
        entry = next(each for each in first.model_config_list.config if each.name == split.model)
        for label, version in dict(entry.version_labels).items():
            if version in loaded:
                continue
            del entry.version_labels[label]
            if label == CANARY and split.state.stable in loaded:
                entry.version_labels[label] = split.state.stable
        # A version that `latest` would unload meanwhile, but that a label names, is already in the policy.
        _send(client, first)
        _wait(client, split.model, wanted, limit_s=limit_s)
    _send(client, config)


def _loaded(split: ExportedSplit, *, now_s: float) -> list[int]:
    state = split.state
    versions = {*labels_of(split).values(), *split.versions}
    if state.phase is Phase.COMPLETED and now_s < state.began_s + state.settings.keep_previous_s:
        versions.add(state.baseline)
    return sorted(versions)


def _read(path: Path, config: Any) -> None:
    from google.protobuf import text_format

    try:
        text_format.Parse(path.read_text("utf-8"), config)
    except (OSError, UnicodeDecodeError, text_format.ParseError) as error:
        raise ConfigError(
            "--config must be a model_config_file of TensorFlow Serving",
            got=Plain(f"{path}: {error}"),
        ) from None
    if config.WhichOneof("config") not in (None, "model_config_list"):
        raise ConfigError(
            "--config must have a model_config_list", got=Plain(config.WhichOneof("config"))
        )


def _send(client: GrpcClient, config: Any) -> None:
    request = message("ReloadConfigRequest")
    request.config = config.SerializeToString()
    client.call(RELOAD_CONFIG, request, "ReloadConfigResponse")


def _states(client: GrpcClient, model: str) -> Mapping[int, tuple[int, str]]:
    """Version -> its state and the reason of a failure; empty if the server does not know the model."""
    request = message("GetModelStatusRequest")
    request.model_spec.name = model
    try:
        answer = client.call(MODEL_STATUS, request, "GetModelStatusResponse")
    except RefusedError as error:
        if error.status == "NOT_FOUND":
            return {}
        raise
    return {
        each.version: (each.state, each.status.error_message)
        for each in answer.model_version_status
    }


def _wait(client: GrpcClient, model: str, versions: set[int], *, limit_s: float) -> None:
    end_s = time.monotonic() + limit_s
    while True:
        states = _states(client, model)
        missing = [each for each in sorted(versions) if states.get(each, (0, ""))[0] != _AVAILABLE]
        if not missing:
            return
        failed = [
            (each, states[each][1]) for each in missing if states.get(each, (0, ""))[0] == _END
        ]
        reasons = [f"version {version}: {why}" for version, why in failed if why]
        if reasons or time.monotonic() > end_s:
            raise UserError(
                f"{client.address} must load versions {', '.join(map(str, sorted(versions)))} of {model!r}",
                got=Plain(
                    "; ".join(reasons) or f"not {', '.join(map(str, missing))} within {limit_s:g} s"
                ),
                fix="See the log of the server; its labels name no version that is not loaded.",
            )
        time.sleep(_POLL_S)  # TensorFlow Serving announces no change of state
