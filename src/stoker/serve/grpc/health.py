"""The standard health service: what a balancer asks.

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
"""The services that are as healthy as the server is."""

_MAX_NAME = 256
"""Longest name that is watched; models' folders have no longer ones."""

_MAX_LISTED = 100
"""More than so many are not listed; grpc-go's limit."""


class Health:
    """The health service, told of every change by `refresh`."""

    def __init__(self, plane: DataPlane) -> None:
        """Args: plane: what is healthy when it is ready."""
        self._plane = plane
        self._servicer = _Health()
        self._known: set[str] = set()
        self.refresh()

    def add_to(self, server: grpc.Server) -> None:
        """Answer on a server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    def refresh(self) -> None:
        """Look how the server and each model are, and tell whoever watches."""
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
        """How many streams are told of changes."""
        return self._servicer.watchers()

    def _set(self, service: str, healthy: bool) -> None:
        status = health_pb2.HealthCheckResponse
        self._servicer.set(service, status.SERVING if healthy else status.NOT_SERVING)


Send = Callable[[Any], None]
"""Takes the next message of a stream, None for its end."""


class _Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # the package has no types
    """The service; the package's own keeps every name that anybody ever watched."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._statuses: dict[str, int] = {}
        self._sends: dict[str, set[Send]] = {}

    def set(self, service: str, status: int) -> None:
        """Tell whoever watches how a service is, if it is not as it was."""
        with self._lock:
            if self._statuses.get(service) == status:
                return
            self._statuses[service] = status
            for send in self._sends.get(
                service, ()
            ):  # in the lock: none is told an older one later
                send(health_pb2.HealthCheckResponse(status=status))

    def watchers(self) -> int:
        """How many streams there are."""
        with self._lock:
            return sum(map(len, self._sends.values()))

    def Check(  # noqa: N802 - the protocol's name
        self, request: Any, context: grpc.ServicerContext
    ) -> Any:
        status = self._statuses.get(request.service)
        if status is None or status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            context.abort(grpc.StatusCode.NOT_FOUND, "there is no such service")
        return health_pb2.HealthCheckResponse(status=status)

    def List(  # noqa: N802 - the protocol's name
        self, request: Any, context: grpc.ServicerContext
    ) -> Any:
        del request
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with self._lock:
            known = {name: how for name, how in self._statuses.items() if how != unknown}
        if len(known) > _MAX_LISTED:
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"there are {len(known)} services, {_MAX_LISTED} may be listed",
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
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no service has so long a name")
        unknown = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with self._lock:
            self._sends.setdefault(service, set()).add(send)
            status = self._statuses.get(service, unknown)
            send(health_pb2.HealthCheckResponse(status=status))
        if not context.add_callback(functools.partial(self._forget, service, send)):
            self._forget(service, send)

    # A client that watches holds no thread: it is told by `send`.
    Watch.experimental_non_blocking = True  # type: ignore[attr-defined] # as grpcio marks it

    def _forget(self, service: str, send: Send) -> None:
        with self._lock:
            sends = self._sends.get(service, set())
            sends.discard(send)
            if not sends:
                self._sends.pop(service, None)
