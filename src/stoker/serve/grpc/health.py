"""The standard health service, for load balancers.

Source: grpc/grpc, `health/v1/health.proto`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stoker.serve.dataplane.plane import DataPlane

SERVICES = ("tensorflow.serving.PredictionService", "tensorflow.serving.ModelService")
"""Services whose health is the health of the whole server."""

_MAX_NAME = 256
"""Maximum number of characters of a name that can be watched; the folder of a model cannot have a longer name."""

_MAX_LISTED = 100
"""Maximum number of services that `List` returns; grpc-go's limit."""


class Health:
    """The health service; `refresh` updates it."""

    def __init__(self, plane: DataPlane) -> None:
        """Args: plane: the dataplane, whose readiness is the health of the server."""
        self._plane = plane
        self._servicer = _Health()
        self._known: set[str] = set()
        self.refresh()

    def add_to(self, server: grpc.Server) -> None:
        """Register the service on a server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def refresh(self) -> None:
        """Update the health of the server and of each model, and notify watchers of changes."""
        ready = not self._plane.unready()
        for service in ("", *SERVICES):
            self._set(service, ready)
        models = self._plane.models.available()
        names = set(models)
        for name, available in models.items():
            self._set(name, available and not self._plane.draining)
        for gone in self._known - names:
            self._servicer.set(gone, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        self._known = names

    def watchers(self) -> int:
        """Return the number of watching streams."""
        return self._servicer.watchers()

    def _set(self, service: str, healthy: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self._servicer.set(service, status.SERVING if healthy else status.NOT_SERVING)


Send = Callable[[Any], None]
"""Sends a message of a stream; None ends it."""


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the package has no types
    """The service. Unlike the servicer of grpcio's package, it does not keep every name that was ever watched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._statuses: dict[str, int] = {}
        self._sends: dict[str, set[Send]] = {}

    def set(self, service: str, status: int) -> None:
        """Set the health of a service, and notify its watchers of a change."""
        with self._lock:
            if self._statuses.get(service) == status:
                return
            self._statuses[service] = status
            # Sent under the lock, so that a watcher cannot get an older status after a newer one.
            for send in self._sends.get(service, ()):
                send(health_pb2.HealthCheckResponse(status=status))

    def watchers(self) -> int:
        """Return the number of watching streams."""
        with self._lock:
            return sum(map(len, self._sends.values()))

    def Check(  # noqa: N802 - the protocol's name
        self, request: Any, context: grpc.ServicerContext
    ) -> Any:
        status = self._statuses.get(request.service)
        if status is None or status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=status)

    def List(  # noqa: N802 - the protocol's name
        self, request: Any, context: grpc.ServicerContext
    ) -> Any:
        del request
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with self._lock:
            known = {name: status for name, status in self._statuses.items() if status != unknown}
        if len(known) > _MAX_LISTED:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{len(known)} services are more than the {_MAX_LISTED} that can be listed",
            )
        found = health_pb2.HealthListResponse()
        for name, status in known.items():
            found.statuses[name].status = status
        return found

    def Watch(  # noqa: N802 - the protocol's name
        self, request: Any, context: grpc.ServicerContext, send: Send
    ) -> None:
        service = request.service
        if len(service) > _MAX_NAME:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"a service name must have at most {_MAX_NAME} characters",
            )
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with self._lock:
            self._sends.setdefault(service, set()).add(send)
            status = self._statuses.get(service, unknown)
            send(health_pb2.HealthCheckResponse(status=status))
        if not context.add_callback(functools.partial(self._forget, service, send)):
            self._forget(service, send)

    # grpcio's mark of a handler that holds no thread while a client watches: `send` sends the changes.
    Watch.experimental_non_blocking = True  # type: ignore[attr-defined] # as grpcio marks it

    def _forget(self, service: str, send: Send) -> None:
        with self._lock:
            sends = self._sends.get(service, set())
            sends.discard(send)
            if not sends:
                self._sends.pop(service, None)
