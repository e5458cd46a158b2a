"""The parts that all gRPC calls share: key check, deadline, status, and a line in the access log."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from stoker.core.errors import UserError
from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.deadline import Deadline
from stoker.serve.errors import Code, ServeError
from stoker.serve.observability.access_log import AccessLog, Entry, caller_of, request_id_of
from stoker.serve.request_record import VERSION_HEADER, RequestRecord
from stoker.serve.security.auth import Keys, Role

_MAX_DETAILS = 2000
"""Maximum number of characters of a status message; gRPC allows 8 KiB for all trailers."""

_STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}

_NO_KEY = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/inference.GRPCInferenceService/ServerLive",
    "/inference.GRPCInferenceService/ServerReady",
)
"""Methods that need no key: load balancers call them. Health's `List` names the models, so it needs one."""

_ADMIN = (
    "/tensorflow.serving.ModelService/HandleReloadConfigRequest",
    "/tensorflow.ProfilerService/",
)
"""Methods that need the role admin: they load other models, or slow the server down and reveal its internals."""

_log = logging.getLogger(__name__)


Answer = Callable[[DataPlane, Any, Deadline], Any]
"""Answers a request message with a response message."""


@dataclass(kw_only=True)
class Call:
    """One running call."""

    deadline: Deadline
    """How long its client waits."""

    response: Any = None
    """The response message; set before the call ends, for its size in the access log."""


class Calls:
    """Starts and ends every call in the same way."""

    def __init__(self, *, access_log: AccessLog | None, keys: Keys | None) -> None:
        """Args: access_log: gets a line for each call; keys: the API keys, for the name of a call's key in the log."""
        self._access_log = access_log
        self._keys = keys

    @property
    def noted(self) -> bool:
        """Whether calls are written to an access log."""
        return self._access_log is not None

    @contextmanager
    def call(self, context: grpc.ServicerContext, method: str, request: Any) -> Iterator[Call]:
        """Run the `with` block as a call. An error in it becomes the call's status by `context.abort`, which raises.

        Args:
            context: The context of gRPC.
            method: The name of the method.
            request: The request message; its size in bytes if it was not parsed.
        """
        call = Call(deadline=_deadline_of(context))
        failed: Exception | None = None
        try:
            yield call
        except Exception as error:  # noqa: BLE001 - the edge: the client gets a status
            failed = error
        code, details = _status_of(failed)
        record = call.deadline.record
        self.note(context, method, request, response=call.response, record=record, code=code)
        if record.version is not None:
            name_version(context, record.version)
        if failed is not None:
            context.abort(_STATUS_CODES[int(code)], details)

    def handler(
        self, plane: DataPlane, method: str, answer: Answer
    ) -> Callable[[Any, grpc.ServicerContext], Any]:
        """Return the handler of a method: it runs `answer` as a call.

        Args:
            plane: The dataplane.
            method: The name of the method.
            answer: Returns the response message.
        """

        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            with self.call(context, method, request) as call:
                call.response = answer(plane, request, call.deadline)
            return call.response

        return handle

    def note(
        self,
        context: grpc.ServicerContext,
        method: str,
        request: Any,
        *,
        response: Any,
        record: RequestRecord,
        code: Code = Code.OK,
    ) -> None:
        """Write a finished call to the access log, if there is one.

        Args:
            context: The context of gRPC.
            method: The name of the method.
            request: As in `call`.
            response: The response message; None: no response.
            record: Facts about the call.
            code: The status of the call.
        """
        if self._access_log is None:
            return
        metadata = _text_metadata(context.invocation_metadata())
        entry = Entry(
            protocol="GRPC",
            method=method,
            status=code.name,
            record=record,
            peer=context.peer(),
            bytes_in=request if isinstance(request, int) else request.ByteSize(),
            bytes_out=0 if response is None else response.ByteSize(),
            request_id=request_id_of(metadata.get("x-request-id", "")),
            key="" if self._keys is None else self._keys.name_of(metadata),
            caller=caller_of(metadata.items()),
        )
        self._access_log.add(entry)

    def check_key(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        """Return the handler of a call, or a handler that refuses it. An interceptor of the server.

        Args:
            continuation: Returns the handler.
            details: The method and the metadata of the call; its message is not read yet.
        """
        if self._keys is None or details.method.startswith(_NO_KEY):
            return continuation(details)
        role = Role.ADMIN if details.method.startswith(_ADMIN) else Role.PREDICT
        try:
            self._keys.check(_text_metadata(details.invocation_metadata), role=role)
        except ServeError as error:
            return self._refusing(error, details.method)
        return continuation(details)

    def _refusing(self, error: ServeError, method: str) -> Any:
        def refuse(request: bytes, context: grpc.ServicerContext) -> None:
            with self.call(context, method.rpartition("/")[2], len(request)):
                raise error

        return grpc.unary_unary_rpc_method_handler(refuse)


def name_version(context: grpc.ServicerContext, version: int) -> None:
    """Add the number of the version that answered to a call's trailing metadata."""
    context.set_trailing_metadata(((VERSION_HEADER, str(version)),))


def _text_metadata(metadata: Any) -> dict[str, str]:
    return {name: value for name, value in metadata if isinstance(value, str)}


def _status_of(error: Exception | None) -> tuple[Code, str]:
    """Return the code and the message of a call's status."""
    if error is None:
        return Code.OK, ""
    if isinstance(error, ServeError):
        return error.code, error.message
    if isinstance(error, UserError):
        return Code.INVALID_ARGUMENT, error.line()[:_MAX_DETAILS]
    _log.error("a call failed because of a bug in the server", exc_info=error)
    return Code.INTERNAL, "the request failed because of a bug in the server; see its log"


def value_of(context: grpc.ServicerContext, wanted: str) -> bytes | None:
    """Return the last value of a metadata key; None if the key is missing."""
    found: bytes | None = None
    for name, value in context.invocation_metadata():
        if name == wanted:
            found = value if isinstance(value, bytes) else value.encode()
    return found


def _deadline_of(context: grpc.ServicerContext) -> Deadline:
    """Return the call's deadline, which is cancelled when the client cancels or disconnects."""
    left_s = context.time_remaining()
    deadline = Deadline(math.inf if left_s is None else left_s)
    deadline.record.headers = functools.partial(value_of, context)
    deadline.record.route = getattr(context, "route", None)
    if not context.add_callback(deadline.cancel):
        deadline.cancel()
    return deadline
