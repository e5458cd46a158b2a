"""Labels in a server that checks them before it loads anything, in TensorFlow Serving's order.

TensorFlow Serving itself comes in no package, so a server of a few lines keeps its rule. Source:
tensorflow/serving, `ServerCore::ReloadConfig`, which calls `UpdateModelVersionLabelMap` first.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from tensorflow_serving.config import model_server_config_pb2

from stoker.client.grpc_client import GrpcClient
from stoker.client.messages import message
from stoker.core.errors import UserError
from stoker.rollout.export.split import ExportedSplit
from stoker.rollout.export.tf_serving import model_server_config, reload_server
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import Phase, RolloutState

AVAILABLE, LOADING = 30, 20


@dataclass
class Server:
    """The versions and labels of one model."""

    loaded: set[int] = field(default_factory=lambda: {1})
    labels: list[dict[str, int]] = field(default_factory=list)
    """After each reload that was accepted."""

    refuses: int = -1
    """A version that stays in the state LOADING."""

    def status(self, _: Any, context: Any) -> Any:
        answer = message("GetModelStatusResponse")
        for version in sorted(self.loaded):
            state = LOADING if version == self.refuses else AVAILABLE
            answer.model_version_status.add(version=version, state=state)
        return answer

    def reload(self, request: Any, context: Any) -> Any:
        config = model_server_config_pb2.ModelServerConfig.FromString(request.config)
        (entry,) = config.model_config_list.config
        for label, version in entry.version_labels.items():
            if version not in self.loaded or version == self.refuses:
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"{label} is not available")
        self.labels.append(dict(entry.version_labels))
        self.loaded = set(entry.model_version_policy.specific.versions)
        return message("ReloadConfigResponse")


@pytest.fixture
def serving() -> Iterator[tuple[Server, GrpcClient]]:
    found = Server()
    methods = {
        "GetModelStatus": (found.status, "GetModelStatusRequest"),
        "HandleReloadConfigRequest": (found.reload, "ReloadConfigRequest"),
    }
    handlers = {
        name: grpc.unary_unary_rpc_method_handler(
            answer,
            request_deserializer=type(message(request)).FromString,
            response_serializer=lambda answered: answered.SerializeToString(),
        )
        for name, (answer, request) in methods.items()
    }
    server = grpc.server(ThreadPoolExecutor(1))
    service = "tensorflow.serving.ModelService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with GrpcClient(f"127.0.0.1:{port}") as client:
        yield found, client
    server.stop(None)


def reload(client: GrpcClient, phase: Phase, *, candidate: int = 7) -> None:
    settings = RolloutSettings(keep_previous_s=0.0)
    state = RolloutState(
        rollout=1, baseline=1, candidate=candidate, settings=settings, began_s=0.0, phase=phase
    )
    split = ExportedSplit(model="taxi", state=state)
    config = model_server_config(split, base_path="/models/taxi", now_s=1.0)
    reload_server(client, split, config, limit_s=0.2)


def test_no_label_is_missing_for_a_moment(serving: tuple[Server, GrpcClient]) -> None:
    server, client = serving
    reload(client, Phase.RUNNING)
    reload(client, Phase.BAKING)
    reload(client, Phase.COMPLETED)

    # The candidate's label names the stable version until the candidate is loaded.
    assert server.labels == [
        {"stable": 1, "canary": 1},
        {"stable": 1, "canary": 7},
        {"stable": 7, "canary": 7},
        {"stable": 7, "canary": 7},
    ]
    assert server.loaded == {7}


def test_a_version_that_does_not_load_gets_no_label(serving: tuple[Server, GrpcClient]) -> None:
    server, client = serving
    server.refuses = 7
    with pytest.raises(UserError, match=r"must load versions 1, 7 .* not 7 within 0.2 s"):
        reload(client, Phase.RUNNING)
    assert server.labels == [{"stable": 1, "canary": 1}]
