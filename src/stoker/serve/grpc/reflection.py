"""The reflection service, for grpcurl and clients without generated code.

Source: grpc/grpc, `reflection/v1alpha/reflection.proto` and `reflection/v1/reflection.proto`, which
has the same messages in another package.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc
from tensorflow_serving.apis import model_service_pb2, prediction_service_pb2

from stoker.serve.grpc.descriptions import OPEN_INFERENCE, PROFILER

_TF_SERVING = (prediction_service_pb2, model_service_pb2)
"""Modules that describe TensorFlow Serving's services. They are imported here, because the stubs do not import them."""

_V1 = "grpc.reflection.v1.ServerReflection"
"""The service that newer clients call first; grpcio's package has the older name only."""

_STREAMS = 2
"""Maximum number of concurrent reflection streams; each stream holds one of the server's threads."""

_STREAM_S = 30.0
"""Maximum duration of a reflection stream, seconds; grpcurl needs less than one second."""


def add_reflection(server: grpc.Server, *, with_profiler: bool) -> None:
    """Register reflection on a server."""
    files = [module.DESCRIPTOR for module in _TF_SERVING]
    serving = [found.full_name for file in files for found in file.services_by_name.values()]
    names = (*serving, OPEN_INFERENCE.service, health.SERVICE_NAME, reflection.SERVICE_NAME, _V1)
    pools = [_v1_pool(), OPEN_INFERENCE.pool]
    if with_profiler:
        names = (*names, PROFILER.service)
        pools.append(PROFILER.pool)
    servicer = _Reflection(names, _Pools(*pools))
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": handler}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_V1, handlers),))


def _v1_pool() -> descriptor_pool.DescriptorPool:
    """Return a pool with the newer package, made from the older one.

    In the default pool, it could clash with the package of a library.
    """
    older, newer = (descriptor_pb2.FileDescriptorProto() for _ in range(2))
    reflection_pb2.DESCRIPTOR.CopyToProto(older)
    text_format.Parse(text_format.MessageToString(older).replace("v1alpha", "v1"), newer)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(newer)
    return pool


class _Pools:
    """The default descriptor pool, and pools that must not be merged into it."""

    def __init__(self, *others: Any) -> None:
        self._default = descriptor_pool.Default()
        self._pools = (self._default, *others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._default, name)  # the other pools have no extensions

    def FindFileByName(self, name: str) -> Any:  # noqa: N802 - as the pool's
        return self._found("FindFileByName", name)

    def FindFileContainingSymbol(self, symbol: str) -> Any:  # noqa: N802 - as the pool's
        return self._found("FindFileContainingSymbol", symbol)

    def _found(self, method: str, name: str) -> Any:
        for pool in self._pools:
            try:
                return getattr(pool, method)(name)
            except KeyError:  # not in this pool
                continue
        raise KeyError(name)


class _Reflection(reflection.ReflectionServicer):  # type: ignore[misc] # the package has no types
    """Reflection with limits on the number and duration of streams, so that other calls get threads."""

    def __init__(self, names: Iterable[str], pools: _Pools) -> None:
        super().__init__(names, pools)
        self._free = threading.BoundedSemaphore(_STREAMS)

    def ServerReflectionInfo(  # noqa: N802 - the protocol's name
        self, request_iterator: Iterator[Any], context: grpc.ServicerContext
    ) -> Iterator[Any]:
        if not self._free.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many reflection streams")
        timer = threading.Timer(_STREAM_S, context.cancel)
        timer.daemon = True
        timer.start()
        try:
            yield from super().ServerReflectionInfo(request_iterator, context)
        finally:
            timer.cancel()
            self._free.release()
