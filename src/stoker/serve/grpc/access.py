"""Who may call by gRPC, and how they are sure of each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from stoker.serve.auth import Keys, Role
from stoker.serve.errors import ServeError
from stoker.serve.tls import Tls

_OPEN = "/grpc.health.v1.Health/"
"""What needs no key: a balancer asks it."""

_ADMIN = "/tensorflow.serving.ModelService/HandleReloadConfigRequest"
"""What loads other files."""


class KeyInterceptor(grpc.ServerInterceptor):  # type: ignore[misc] # grpcio has no types
    """Lets a call pass whose key allows it; before its message is read."""

    def __init__(self, keys: Keys) -> None:
        """Args: keys: those that are known."""
        self._keys = keys

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """The handler of the call, or one that refuses it."""
        if details.method.startswith(_OPEN):
            return continuation(details)
        role = Role.ADMIN if details.method == _ADMIN else Role.PREDICT
        metadata = {
            key: value for key, value in details.invocation_metadata if isinstance(value, str)
        }
        try:
            self._keys.check(metadata, role=role)
        except ServeError as error:
            return _refusing(error)
        return continuation(details)


def credentials(tls: Tls) -> Any:
    """What the gRPC port needs for TLS."""
    return grpc.ssl_server_credentials(
        [(tls.key.encode(), tls.certificate.encode())],
        root_certificates=tls.authority.encode() or None,
        require_client_auth=tls.client_verify,
    )


def _refusing(error: ServeError) -> Any:
    codes = {code.value[0]: code for code in grpc.StatusCode}

    def refuse(_request: Any, context: grpc.ServicerContext) -> None:
        context.abort(codes[int(error.code)], error.message)

    return grpc.unary_unary_rpc_method_handler(refuse)
