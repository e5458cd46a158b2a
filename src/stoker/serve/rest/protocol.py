"""HTTP connections with limits on their number, the size of headers, and time."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import httptools

from stoker.serve.limits import HttpLimits
from stoker.serve.rest.header_cache import Head, is_small, without_upgrade
from stoker.serve.rest.inline_predict import InlinePredict, Small
from stoker.serve.rest.messages import Scope, header, takes_gzip
from stoker.serve.rest.uvicorn_adapter import STATUS_LINE, HttpToolsProtocol, new_cycle

RETRY_AFTER_S = 1
"""When a client that was turned away may come again, seconds."""


_BODY_S = 0.005
"""How long the body of a small request may take behind its head."""

_READ_BYTES = 16 << 10
"""What a client has to take of an answer in the time of one that is not read; less is as nothing."""

_LOOKS = 4
"""How often it is looked at in that time."""

GONE = "stoker.gone"
"""Where the scope of a request has what is called when its client has hung up."""


def _nobody() -> None:
    """Nobody is told: the request did not come to a model."""


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's connection, which by itself waits for ever and reads headers of any size."""

    limits = HttpLimits()
    lane: InlinePredict | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """As uvicorn's."""
        super().__init__(*args, **kwargs)
        self._in_head, self._begun = True, False
        self._head_bytes = 0
        self._too_large = False
        self._refused = False
        self._small: Small | None = None
        self._whole: Small | None = None
        self._said_of: list[tuple[bytes, bytes]] | None = None
        self._said = b""
        self._small_timer: asyncio.TimerHandle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._send_timer: asyncio.TimerHandle | None = None
        self._unread_bytes, self._read_s = (
            0,
            0.0,
        )  # when the client took something, by the loop's clock
        self._idle: asyncio.TimerHandle | None = None  # of a connection that asks small things
        self._asked_s = 0.0  # when it was answered last, by the loop's clock

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn's
        """Take the connection, or turn it away."""
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(503, "too many connections")
            return
        self._expect_within(self.limits.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget its timers."""
        self._stop_timer()
        self._forget_small()
        for timer in (self._send_timer, self._idle):
            if timer is not None:
                timer.cancel()
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cast("dict[str, Any]", cycle.scope).get(GONE, _nobody)()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what came, and hold it to its limits."""
        self._unset_keepalive_if_required()
        if self._refused or self.transport.is_closing():
            return
        between = self._in_head and not self._begun and not self._head_bytes
        if between and self.lane is not None and self._is_known(data, self.lane):
            return
        if between:
            data = without_upgrade(data)
        if self._in_head:
            self._head_bytes += len(data)
        self._whole = None
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "no protocol but HTTP is spoken here")
        except httptools.HttpParserError:
            if self._too_large:
                self._refuse(431, "the headers are too large")
            else:
                self._refuse(400, "this is no HTTP request")
        else:
            self._after_data(data, alone=between)

    def _is_known(self, data: bytes, lane: InlinePredict) -> bool:
        """Whether it is one request as one before it, which needs no parser; if so, it is taken."""
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
        self.cycle = small  # type: ignore[assignment] # has all that uvicorn asks of one
        self._whole = small
        lane.add(small)

    def _after_data(self, data: bytes, *, alone: bool) -> None:
        if self._in_head and self._head_bytes > self.limits.head_bytes:
            self._refuse(431, "the headers are too large")
        if self._small is not None and self._small_timer is None:
            # Many clients send head and body apart, and the body comes at once; else it is slow.
            self._small_timer = self.loop.call_later(_BODY_S, self._leave_small)
        if self._begun and self._timer is None:  # what came whole needs no clock
            limits = self.limits
            self._expect_within(limits.head_s if self._in_head else limits.body_s)
        if alone and self._whole is not None and self.lane is not None:
            self.lane.heads.add(data, self._whole.head, body_bytes=len(self._whole.body))

    def on_message_begin(self) -> None:
        """The first bytes of a request."""
        self._begun = True
        self._unset_keepalive_if_required()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The headers are there: the body has its own time."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.head_bytes:
            self._too_large = True
            raise ValueError("the headers are too large")  # httptools ends parsing by this
        self._in_head, self._head_bytes = False, 0
        self._stop_timer()
        self._small = self._as_small()
        if self._small is not None:
            return
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A part of the body."""
        if self._small is not None:
            self._small.body += body
        else:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is there: now it is the server's turn."""
        self._in_head, self._begun = True, False
        self._stop_timer()
        small = self._forget_small()
        if small is not None and self.lane is not None:
            self._take(small, self.lane)
            return
        super().on_message_complete()
        if self.cycle.response_complete and self.timeout_keep_alive_task is None:
            # It was answered before its body was there.
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def answer(self, small: Small, raw: bytes, *, packed: bytes | None, close: bool) -> None:
        """Write the answer to a request of the lane."""
        small.keep_alive = small.keep_alive and not close
        given = self.server_state.default_headers
        if given is not self._said_of:  # uvicorn makes them anew each second
            lines = b"".join(b"%b: %b\r\n" % (name, value) for name, value in given)
            own = b"" if self.lane is None else self.lane.headers
            self._said = STATUS_LINE[200] + lines + b"content-type: application/json\r\n" + own
            self._said_of = given
        more = b"" if packed is None else b"content-encoding: gzip\r\nvary: accept-encoding\r\n"
        if not small.keep_alive:
            more += b"connection: close\r\n"
        body = raw if packed is None else packed
        self.transport.write(
            b"%b%bcontent-length: %d\r\n\r\n%b" % (self._said, more, len(body), body)
        )
        small.response_started = small.response_complete = True
        if not small.keep_alive:
            self.transport.close()
        if self.pipeline or self.flow.read_paused:
            self.on_response_complete()
        else:
            self._stay()

    def _stay(self) -> None:
        """As `on_response_complete` where nothing waits, but its clock is not set anew each time."""
        self.server_state.total_requests += 1
        self._asked_s = self.loop.time()
        if self._idle is None and not self.transport.is_closing():
            self._idle = self.loop.call_later(self.timeout_keep_alive, self._look_whether_idle)

    def _look_whether_idle(self) -> None:
        """Close a connection that asks nothing; one that has asked gets the rest of its time."""
        self._idle = None
        cycle = self.cycle
        if self.transport.is_closing() or cycle is None or not cycle.response_complete:
            return  # the clock is set again behind the next answer
        left_s = self._asked_s + self.timeout_keep_alive - self.loop.time()
        if left_s > 0:
            self._idle = self.loop.call_later(left_s, self._look_whether_idle)
        elif not self._begun and not self._head_bytes and self.timeout_keep_alive_task is None:
            self.timeout_keep_alive_handler()

    def _leave_small(self) -> None:
        """Its body does not come: it is no request for the lane."""
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
        """Let a request of the lane go the way of the others; of its body more may have to come."""
        cycle = new_cycle(self, self.scope_of(small.head), keep_alive=small.keep_alive)
        cycle.body, cycle.more_body = bytearray(small.body), not whole
        if whole or small.body:
            cycle.message_event.set()
        if not whole or self.cycle is cast("Any", small):  # else another came behind it
            self.cycle = cycle
        self._start_asgi_task(cycle, self.app)

    def _as_small(self) -> Small | None:
        """The request whose headers are there, if the lane takes it."""
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
        """ASGI's scope of a request of the lane."""
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
        """The client does not read: its time runs."""
        self._unread_bytes = self.transport.get_write_buffer_size()
        self._read_s = self.loop.time()
        self._look_whether_read()
        super().pause_writing()

    def resume_writing(self) -> None:
        """It reads again."""
        if self._send_timer is not None:
            self._send_timer.cancel()
        self._send_timer = None
        super().resume_writing()

    def _look_whether_read(self) -> None:
        """Cut a client that has not read for so long; one that is slow gets its time anew."""
        unread_bytes, now_s = self.transport.get_write_buffer_size(), self.loop.time()
        if self._unread_bytes - unread_bytes >= _READ_BYTES:
            self._unread_bytes, self._read_s = unread_bytes, now_s
        self._unread_bytes = max(self._unread_bytes, unread_bytes)  # what was asked before came too
        left_s = self._read_s + self.limits.send_s - now_s
        if left_s <= 0:
            self.transport.abort()
            return
        look_s = min(left_s, self.limits.send_s / _LOOKS)
        self._send_timer = self.loop.call_later(look_s, self._look_whether_read)

    def _expect_within(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._too_slow)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None

    def _too_slow(self) -> None:
        if self._in_head and not self._head_bytes:
            self.transport.close()  # it never spoke: there is nothing to answer
        else:
            self._refuse(408, "the request took too long to arrive")

    def _refuse(self, status: int, message: str) -> None:
        """Answer, unless an answer is under way, and end the connection."""
        self._stop_timer()
        self._forget_small()
        self._refused = True
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and not cycle.more_body:
            # What is wrong came behind a request that is being answered: its answer goes out first.
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
    """The protocol with these limits and this lane; uvicorn takes a class."""
    return type("LimitedProtocol", (LimitedProtocol,), {"limits": limits, "lane": lane})
