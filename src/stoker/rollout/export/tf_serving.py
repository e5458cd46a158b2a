"""Exports a rollout to TensorFlow Serving, as labels: `stable`, and `canary` for the candidate.

Labels do not split traffic: a client or a gateway chooses one of them.
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
"""`ModelVersionStatus.State.END`: the version was unloaded or could not be loaded."""

_POLL_S = 0.5
"""Interval between two reads of the versions' states, seconds."""


def labels_of(split: ExportedSplit) -> dict[str, int]:
    """Return label -> version. Without a candidate, `canary` names the stable version too, so that it always answers."""
    state = split.state
    candidate = state.candidate if state.phase in ACTIVE else state.stable
    return {STABLE: state.stable, CANARY: candidate}


def model_server_config(
    split: ExportedSplit, *, base_path: str, others: Path | None = None, now_s: float
) -> model_server_config_pb2.ModelServerConfig:
    """Return the configuration of a TensorFlow Serving server.

    Args:
        split: The model's traffic split.
        base_path: Folder of the model's versions, as the server sees it.
        others: A `model_config_file`, whose other models are kept; None: the server has no such file.
        now_s: Seconds since the epoch, to decide whether the previous version still stays loaded.

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
        entry.CopyFrom(mine)  # keeps the model's other settings, such as logging
    entry.base_path = base_path
    entry.model_version_policy.specific.versions[:] = _loaded(split, now_s=now_s)
    for label, version in labels_of(split).items():
        entry.version_labels[label] = version
    del models[:]
    models.extend([*kept, entry])
    return config


def config_text(config: model_server_config_pb2.ModelServerConfig) -> str:
    """Return the configuration in the text format of a `model_config_file`."""
    from google.protobuf import text_format

    return text_format.MessageToString(config)


def reload_server(
    client: GrpcClient,
    split: ExportedSplit,
    config: model_server_config_pb2.ModelServerConfig,
    *,
    limit_s: float,
) -> None:
    """Send a configuration to a server: first the versions, and when these are loaded, the labels.

    TensorFlow Serving refuses a label for a version that is not loaded, and it checks labels before it loads versions.
    So the first call contains only labels of loaded versions.

    Args:
        client: Client of the server.
        split: The model's traffic split.
        config: Configuration of all models of the server; the server unloads every other model.
        limit_s: Maximum time for the versions to load, seconds.

    Raises:
        UserError: a version could not be loaded, or not in time; labels keep their old versions if these are loaded.
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
        # The server does not unload a version that a label names, because the policy of the first call already contains
        # it.
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
    """Return version -> its state and the reason of a failure; empty if the server does not know the model."""
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
                fix="See the server's log. Labels were set only for loaded versions.",
            )
        time.sleep(_POLL_S)  # TensorFlow Serving does not notify clients of a change of state
