"""What every call has in common: a deadline, an end with a code, and a line in the access log."""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from typing import Any

import grpc

from stoker.core.errors import UserError
from stoker.serve.deadline import Deadline
from stoker.serve.errors import Code, ServeError
from stoker.serve.observability.access_log import AccessLog, Entry, caller_of, request_id_of
from stoker.serve.request_record import RequestRecord
from stoker.serve.security.auth import Keys

_MAX_DETAILS = 2000
"""Longest text of a refusal; gRPC has 8 KiB for all that ends a call."""

STATUS_CODES = {code.value[0]: code for code in grpc.StatusCode}
"""gRPC's status by its number."""

_log = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Call:
    """One call while it is answered."""

    deadline: Deadline
    """How long its client waits."""

    response: Any = None
    """The answer's message; set before the call ends, for its size."""


class Calls:
    """Opens and ends calls, each the same way."""

    def __init__(self, *, access_log: AccessLog | None, keys: Keys | None) -> None:
        """Args: access_log: where a line for each goes; keys: whose names stand in it."""
        self._access_log = access_log
        self._keys = keys

    @property
    def noted(self) -> bool:
        """Whether a line is written for each."""
        return self._access_log is not None

    def call(self, context: grpc.ServicerContext, method: str, request: Any) -> Answering:
        """Answer a call; a refusal goes to the client, by `abort`, which raises and ends the call.

        Args:
            context: gRPC's.
            method: The call's name.
            request: Its message, or the number of bytes of one that was not read.
        """
        return Answering(self, context, method, request)

    def end(
        self,
        call: Call,
        context: grpc.ServicerContext,
        method: str,
        request: Any,
        error: BaseException | None,
    ) -> None:
        """Note how a call ended, and refuse it if it failed: that raises.

        Args:
            call: The call.
            context: gRPC's.
            method: The call's name.
            request: As in `call`.
            error: What it failed by, None if it did not.
        """
        code, said = _refusal_of(error)
        record = call.deadline.record
        self.note(context, method, request, response=call.response, record=record, code=code)
        if isinstance(error, Exception):
            context.abort(STATUS_CODES[int(code)], said)

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
        """Write the line of a call that is over, where one is written.

        Args:
            context: gRPC's.
            method: The call's name.
            request: As in `call`.
            response: The answer's message, None if there is none.
            record: What became known of it.
            code: How it ended.
        """
        if self._access_log is None:
            return
        metadata = {
            name: value for name, value in context.invocation_metadata() if isinstance(value, str)
        }
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


class Answering:
    """The context of a call while it is answered."""

    __slots__ = ("_call", "_calls", "_context", "_method", "_request")

    def __init__(
        self, calls: Calls, context: grpc.ServicerContext, method: str, request: Any
    ) -> None:
        """Args: calls: what ends it; the rest as in `Calls.call`."""
        self._calls, self._context = calls, context
        self._method, self._request = method, request
        self._call = Call(deadline=_patience_of(context))

    def __enter__(self) -> Call:
        """It begins."""
        return self._call

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """It ends; an error goes to the client."""
        self._calls.end(self._call, self._context, self._method, self._request, error)


def _refusal_of(error: BaseException | None) -> tuple[Code, str]:
    """The code and the text of what a call failed by."""
    if error is None:
        return Code.OK, ""
    if isinstance(error, ServeError):
        return error.code, error.message
    if isinstance(error, UserError):
        return Code.INVALID_ARGUMENT, error.line()[:_MAX_DETAILS]
    _log.error("a call met a bug", exc_info=error)
    return Code.INTERNAL, "the server has a bug; its log says more"


def _value_of(context: grpc.ServicerContext, wanted: str) -> bytes | None:
    """The last value of a metadata key, None if there is none."""
    found: bytes | None = None
    for name, value in context.invocation_metadata():
        if name == wanted:
            found = value if isinstance(value, bytes) else value.encode()
    return found


def _patience_of(context: grpc.ServicerContext) -> Deadline:
    """The call's deadline; over at once when the client cancels or its connection ends."""
    left_s = context.time_remaining()
    deadline = Deadline(math.inf if left_s is None else left_s)
    deadline.record.headers = functools.partial(_value_of, context)
    if not context.add_callback(deadline.cancel):
        deadline.cancel()
    return deadline
