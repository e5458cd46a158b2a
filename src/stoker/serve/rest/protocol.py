"""HTTP connections with limits on their number, the size of headers, and time-outs."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httptools

from stoker.serve.limits import HttpLimits
from stoker.serve.request_record import VERSION_HEADER
from stoker.serve.rest.header_cache import Head, is_small, without_upgrade
from stoker.serve.rest.inline_predict import InlinePredict, Small
from stoker.serve.rest.messages import Scope, header, takes_gzip
from stoker.serve.rest.uvicorn_adapter import STATUS_LINE, HttpToolsProtocol, new_cycle

RETRY_AFTER_S = 1
"""`Retry-After` of a refused request, seconds."""


_BODY_S = 0.005
"""Maximum time from the headers of a small request to the end of its body, seconds; then the application answers it."""

_MIN_READ_BYTES = 16 << 10
"""Bytes of a blocked answer that a client must read within `HttpLimits.send_s`."""

_READ_CHECKS = 4
"""Number of checks within `HttpLimits.send_s`."""

GONE = "stoker.gone"
"""Key in a request's scope: the function that is called when the client disconnects."""

_VERSION_LINE = VERSION_HEADER.encode() + b": %d\r\n"

ROUTE = "stoker.route"
"""Key in a request's scope: where a rollout sent the request, if the event loop routed it already."""


def _ignore() -> None:
    """Ignore the disconnection: the request did not reach a model."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's connection with limits. uvicorn itself would wait forever, and read headers of any size."""

    limits = HttpLimits()
    lane: InlinePredict | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Args: see uvicorn."""
        super().__init__(*args, **kwargs)
        self._in_head, self._begun = True, False
        self._head_bytes = 0
        self._too_large = False
        self._refused = False
        self._small: Small | None = None
        self._whole: Small | None = None
        self._prefix_headers: list[tuple[bytes, bytes]] | None = None
        self._prefix = b""
        self._small_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._unread_bytes = 0
        self._read_s = 0.0  # when the client last read enough, seconds of the loop's clock
        self._idle: asyncio.TimerHandle | None = None  # between requests answered in the event loop
        self._answered_s = 0.0  # time of the last answer, seconds of the loop's clock

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """Accept the connection, or refuse it if there are too many connections."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(503, "too many connections")
            return
        self._start_timer(self.limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the timers, and notify the running request."""
        self._stop_timer()
        self._forget_small()
        for timer in (self._send_timer, self._idle):
            if timer is not None:
                timer.cancel()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cast("dict[str, Any]", cycle.scope).get(GONE, _ignore)()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the data, and enforce the limits."""
        self._unset_keepalive_if_required()
        if self._refused or self.transport.is_closing():
            return
        between = self._in_head and not self._begun and not self._head_bytes
        if between and self.lane is not None and self._answers_cached(data, self.lane):
            return
        if between:
            data = without_upgrade(data)
        if self._in_head:
            self._head_bytes += len(data)
        self._whole = None
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "only HTTP is supported on this port")
        except httptools.HttpParserError:
            if self._too_large:
                self._refuse(431, "the headers are too large")
            else:
                self._refuse(400, "not an HTTP request")
        else:
            self._after_data(data, alone=between)

    def _answers_cached(self, data: bytes, lane: InlinePredict) -> bool:
        """If the data is a request whose headers are cached, start to answer it; return whether it is."""
        cycle = self.cycle
        if (cycle is not None and not cycle.response_complete) or self.flow.write_paused:
            return False
        found = lane.heads.find(data)
        if found is None:
            return False
        self._stop_timer()
        self._take(Small(self, *found), lane)
        return True

    def _take(self, small: Small, lane: InlinePredict) -> None:
        self.cycle = small  # type: ignore[assignment] # has the attributes that uvicorn needs of a cycle
        self._whole = small
        lane.add(small)

    def _after_data(self, data: bytes, *, alone: bool) -> None:
        if self._in_head and self._head_bytes > self.limits.head_bytes:
            self._refuse(431, "the headers are too large")
        if self._small is not None and self._small_timer is None:
            # Many clients send the body separately, right after the headers.
            self._small_timer = self.loop.call_later(_BODY_S, self._leave_small)
        if self._begun and self._timer is None:  # a complete request needs no timer
            limits = self.limits
            self._start_timer(limits.head_s if self._in_head else limits.body_s)
        if alone and self._whole is not None and self.lane is not None:
            self.lane.heads.add(data, self._whole.head, body_bytes=len(self._whole.body))

    def on_message_begin(self) -> None:
        """Record the start of a request."""
        self._begun = True
        self._unset_keepalive_if_required()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Check the size of the headers, and end their time limit; the body has its own."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.head_bytes:
            self._too_large = True
            raise ValueError("the headers are too large")  # this makes httptools stop parsing
        self._in_head, self._head_bytes = False, 0
        self._stop_timer()
        self._small = self._as_small()
        if self._small is not None:
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Handle a part of the body."""
        if self._small is not None:
            self._small.body += body
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """Answer the complete request."""
        self._in_head, self._begun = True, False
        self._stop_timer()
        small = self._forget_small()
        if small is not None and self.lane is not None:
            self._take(small, self.lane)
            return
        super().on_message_complete()
        if self.cycle.response_complete and self.timeout_keep_alive_task is None:
            # The request was answered before its body had arrived.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def answer(self, small: Small, raw: bytes, *, packed: bytes | None, close: bool) -> None:
        """Write the answer to a request that was answered in the event loop."""
        small.keep_alive = small.keep_alive and not close
        given = self.server_state.default_headers
        if given is not self._prefix_headers:  # uvicorn renews them every second
            lines = b"".join(b"%b: %b\r\n" % (name, value) for name, value in given)
            own = b"" if self.lane is None else self.lane.headers
            self._prefix = STATUS_LINE[200] + lines + b"content-type: application/json\r\n" + own
            self._prefix_headers = given
        more = _VERSION_LINE % small.version
        if packed is not None:
            more += b"content-encoding: gzip\r\nvary: accept-encoding\r\n"
        if not small.keep_alive:
            more += b"connection: close\r\n"
        body = raw if packed is None else packed
        self.transport.write(
            b"%b%bcontent-length: %d\r\n\r\n%b" % (self._prefix, more, len(body), body)
        )
        small.response_started = small.response_complete = True
        if not small.keep_alive:
            self.transport.close()
        if self.pipeline or self.flow.read_paused:
            self.on_response_complete()
        else:
            self._keep_alive()

    def _keep_alive(self) -> None:
        """Do what `on_response_complete` does if no request waits, but do not restart a running idle timer."""
        self.server_state.total_requests += 1
        self._answered_s = self.loop.time()
        if self._idle is None and not self.transport.is_closing():
            self._idle = self.loop.call_later(self.timeout_keep_alive, self._check_idle)

    def _check_idle(self) -> None:
        """Close the connection if it has been idle long enough; else wait for the rest of the time."""
        self._idle = None
        cycle = self.cycle
        if self.transport.is_closing() or cycle is None or not cycle.response_complete:
            return  # the next answer starts the timer again
        left_s = self._answered_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._idle = self.loop.call_later(left_s, self._check_idle)
        elif not self._begun and not self._head_bytes and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_handler()

    def _leave_small(self) -> None:
        """Pass a request whose body is late to the application."""
        small = self._forget_small()
        if small is not None:
            self.leave_to_app(small, whole=False)

    def _forget_small(self) -> Small | None:
        small, self._small = self._small, None
        if self._small_timer is not None:
            self._small_timer.cancel()
        self._small_timer = None
        return small

    def leave_to_app(self, small: Small, *, whole: bool = True) -> None:
        """Pass a request to the application.

        Args:
            small: The request.
            whole: Whether its body is complete.
        """
        scope = self.scope_of(small.head)
        scope[ROUTE] = small.route
        cycle = new_cycle(self, scope, keep_alive=small.keep_alive)
        cycle.body, cycle.more_body = bytearray(small.body), not whole
        if whole or small.body:
            cycle.message_event.set()
        # Otherwise `self.cycle` already belongs to a later request.
        if not whole or self.cycle is cast("Any", small):
            self.cycle = cycle
        self._start_asgi_task(cycle, self.app)

    def _as_small(self) -> Small | None:
        """Return the request whose headers have arrived; None if it cannot be answered in the event loop."""
        busy = self.cycle is not None and not self.cycle.response_complete
        method = self.parser.get_method()
        if (
            self.lane is None
            or busy
            or self.flow.write_paused
            or not is_small(method, self.url, self.headers)
        ):
            return None
        version = self.parser.get_http_version()
        head = Head(
            raw_path=self.url,
            path=self.url.decode(),
            http_version=version,
            headers=self.headers,
            keep_alive=version != "1.0" and self.parser.should_keep_alive(),
            takes_gzip=takes_gzip(header({"headers": self.headers}, b"accept-encoding")),
        )
        return Small(self, head)

    def scope_of(self, head: Head) -> Scope:
        """Return ASGI's scope of a request from its head."""
        return {
            "type": "http",
            "asgi": {"version": self.asgi_version, "spec_version": "2.3"},
            "http_version": head.http_version,
            "server": self.server,
            "client": self.client,
            "scheme": self.scheme,
            "method": "POST",
            "root_path": self.root_path,
            "path": head.path,
            "raw_path": head.raw_path,
            "query_string": b"",
            "headers": head.headers,
            "state": self.app_state.copy(),
        }

    def pause_writing(self) -> None:
        """Start the time limit of a client that does not read."""
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._read_s = self.loop.time()
        self._check_reading()
        super().pause_writing()

    def resume_writing(self) -> None:
        """Stop the time limit: the client reads again."""
        if self._send_timer is not None:
            self._send_timer.cancel()
        self._send_timer = None
        super().resume_writing()

    def _check_reading(self) -> None:
        """Abort if the client has not read enough within the time limit; reading enough restarts the limit."""
        unread_bytes, now_s = self.transport.get_write_buffer_size(), self.loop.time()
        if self._unread_bytes - unread_bytes >= _MIN_READ_BYTES:
            self._unread_bytes, self._read_s = unread_bytes, now_s
        # Answers may have been added since: the next check then compares with the larger amount.
        self._unread_bytes = max(self._unread_bytes, unread_bytes)
        left_s = self._read_s + self.limits.send_s - now_s
        if left_s <= 0:
            self.transport.abort()
            return
        look_s = min(left_s, self.limits.send_s / _READ_CHECKS)
        self._send_timer = self.loop.call_later(look_s, self._check_reading)

    def _start_timer(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._time_out)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _time_out(self) -> None:
        if self._in_head and not self._head_bytes:
            self.transport.close()  # the client sent nothing, so it gets no answer
        else:
            self._refuse(408, "the request took too long to arrive")

    def _refuse(self, status: int, message: str) -> None:
        """Send an error unless an answer has begun, and close the connection."""
        self._stop_timer()
        self._forget_small()
        self._refused = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            # The previous request is still being answered: send its answer, and close the connection after it.
            cycle.keep_alive = False
            return
        if cycle is None or cycle.response_complete or not cycle.response_started:
            body = json.dumps({"error": message}).encode()
            retry = b"retry-after: %d\r\n" % RETRY_AFTER_S if status == 503 else b""
            self.transport.write(
                STATUS_LINE[status]
                + b"content-type: application/json\r\nconnection: close\r\n"
                + retry
                + b"content-length: %d\r\n\r\n" % len(body)
                + body
            )
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.close()


def limited(limits: HttpLimits, lane: InlinePredict | None) -> type[LimitedProtocol]:
    """Return a protocol class with these limits, since uvicorn requires a class."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits, "lane": lane})
