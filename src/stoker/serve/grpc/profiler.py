"""TensorFlow's profiler service: TensorBoard's "capture profile" on a running server.

The response holds the trace, and the client writes it to a file. TensorFlow Serving writes it to the server's disk
instead, into the folder that the client names. For a client on the same machine, the path is the same.

Source: openxla/xla, `profiler_service_impl.cc`, `client/save_profile.cc`.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import grpc
import tensorflow as tf

from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.errors import Code, ServeError
from stoker.serve.grpc.calls import Calls
from stoker.serve.grpc.descriptions import PROFILER

_LONGEST_S = 60.0
"""Maximum duration of a trace, including the wait before it, seconds; a busy server records about 1 MB per second."""

_CHECK_S = 0.05
"""Seconds between two checks whether the call or the server has ended."""

_FILE = "xplane.pb"
"""The name of the client's file, which follows the host name."""


class ProfilerService:
    """Profiles this process, one trace at a time."""

    def __init__(self, plane: DataPlane, calls: Calls) -> None:
        """Args: plane: reports when the server shuts down; calls: starts and ends calls."""
        self._plane = plane
        self._calls = calls
        self._profiling = threading.Lock()
        self._session = ""
        self._terminated = threading.Event()

    def add_to(self, server: Any) -> None:
        """Register the service on a server."""
        messages = PROFILER.messages
        handlers = {
            method: grpc.unary_unary_rpc_method_handler(
                getattr(self, method),
                request_deserializer=messages[f"{method}Request"].FromString,
                response_serializer=messages[f"{method}Response"].SerializeToString,
            )
            for method in ("Profile", "Terminate", "Monitor")
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(PROFILER.service, handlers),)
        )

    def Profile(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the protocol's name
        """Trace TensorFlow for the requested duration."""
        with self._calls.call(context, "Profile", request) as call:
            call.response = self._profile(request, context)
        return call.response

    def Terminate(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the protocol's name
        """End the trace of a session now. The call that started it returns the trace so far."""
        with self._calls.call(context, "Terminate", request):
            if request.session_id == self._session:
                self._terminated.set()
        return PROFILER.messages["TerminateResponse"]()

    def Monitor(self, request: Any, context: grpc.ServicerContext) -> Any:  # noqa: N802 - the protocol's name
        """Refuse the call, as TensorFlow Serving does: only TPUs support it."""
        with self._calls.call(context, "Monitor", request):
            raise ServeError(Code.UNIMPLEMENTED, "unimplemented.")

    def _profile(self, request: Any, context: grpc.ServicerContext) -> Any:
        options = request.opts
        wait_s = max(0.0, options.start_timestamp_ns / 1e9 - time.time())
        duration_s = options.duration_ms / 1000
        if wait_s + duration_s > _LONGEST_S:
            raise ServeError(
                Code.INVALID_ARGUMENT,
                f"a trace must end within {_LONGEST_S:.0f} s, not {wait_s + duration_s:.0f} s",
            )
        if not self._profiling.acquire(blocking=False):
            raise ServeError(Code.INTERNAL, "Another profiling session active.")
        try:
            self._terminated.clear()
            self._session = request.session_id
            self._wait(wait_s, context)
            return self._traced(duration_s, options, context)
        finally:
            self._session = ""
            self._profiling.release()

    def _traced(self, duration_s: float, options: Any, context: grpc.ServicerContext) -> Any:
        chosen = tf.profiler.experimental.ProfilerOptions()
        if options.version:  # else TensorFlow chooses the levels
            chosen = chosen._replace(
                host_tracer_level=options.host_tracer_level,
                device_tracer_level=options.device_tracer_level,
            )
        response = PROFILER.messages["ProfileResponse"](empty_trace=True)
        with tempfile.TemporaryDirectory(prefix="stoker-profile-") as folder:
            try:
                tf.profiler.experimental.start(folder, chosen)
                self._wait(duration_s, context)
                tf.profiler.experimental.stop(save=context.is_active())
            except tf.errors.OpError as error:
                raise ServeError(Code.INTERNAL, error.message) from error
            for path in Path(folder).glob(f"**/*.{_FILE}"):
                data = path.read_bytes()
                response.empty_trace = _is_empty(data)
                if not response.empty_trace:
                    response.tool_data.add(name=_FILE, data=data)
        return response

    def _wait(self, seconds: float, context: grpc.ServicerContext) -> None:
        """Wait, but only as long as the call, the server and the session last."""
        end_s = time.monotonic() + seconds
        while context.is_active() and not self._plane.draining:
            left_s = end_s - time.monotonic()
            if left_s <= 0 or self._terminated.wait(min(left_s, _CHECK_S)):
                return


def _is_empty(data: bytes) -> bool:
    """Return whether a trace has no events. The response reports it, and the client then tries again."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace.FromString(data)
    return not any(line.events for plane in space.planes for line in plane.lines)
