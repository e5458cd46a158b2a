"""Checks the API key of a gRPC call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from stoker.serve.errors import ServeError
from stoker.serve.grpc.calls import Calls
from stoker.serve.observability.access_log import AccessLog
from stoker.serve.security.auth import Keys, Role

_OPEN = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
)
"""What needs no key: a balancer asks it. Health's `List` names the models, so it needs one."""

_ADMIN = (
    "/tensorflow.serving.ModelService/HandleReloadConfigRequest",
    "/tensorflow.ProfilerService/",
)
"""What loads other files, or slows the server down and shows how it works."""


class KeyInterceptor:
    """Lets a call pass whose key allows it; before its message is read."""

    def __init__(self, keys: Keys, access_log: AccessLog | None = None) -> None:
        """Args: keys: those that are known; access_log: where a line for each refusal goes."""
        self._keys = keys
        self._calls = Calls(access_log=access_log, keys=keys)

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """The handler of the call, or one that refuses it."""
        if details.method.startswith(_OPEN):
            return continuation(details)
        role = Role.ADMIN if details.method.startswith(_ADMIN) else Role.PREDICT
        metadata = {
            key: value for key, value in details.invocation_metadata if isinstance(value, str)
        }
        try:
            self._keys.check(metadata, role=role)
        except ServeError as error:
            return self._refusing(error, details.method)
        return continuation(details)

    def _refusing(self, error: ServeError, method: str) -> Any:
        def refuse(request: bytes, context: grpc.ServicerContext) -> None:
            with self._calls.call(context, method.rpartition("/")[2], len(request)):
                raise error

        return grpc.unary_unary_rpc_method_handler(refuse)
