"""What a handler knows of its call: the part of `grpc.ServicerContext` that servicers use."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import grpc

from stoker.serve.grpc.http2.heads import CallHead

_log = logging.getLogger(__name__)


class Aborted(Exception):
    """A handler has ended its call."""


class Context:
    """One call; may be shared by threads."""

    __slots__ = (
        "_callbacks",
        "_cancel",
        "_deadline_s",
        "_head",
        "_is_over",
        "_peer",
        "code",
        "said",
    )

    def __init__(self, head: CallHead, *, peer: str, cancel: Callable[[], None]) -> None:
        """Args: head: what the call says of itself; peer: who calls; cancel: ends it at once."""
        self._head = head
        self._peer = peer
        self._cancel: Callable[[], None] | None = cancel
        left_s = head.timeout_s
        self._deadline_s = None if left_s is None else time.monotonic() + left_s
        self._callbacks: list[Callable[[], None]] = []
        self._is_over = False
        self.code: Any = grpc.StatusCode.OK
        self.said = ""

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        """What the client sent beside its message."""
        return self._head.metadata

    def peer(self) -> str:
        """The client's address."""
        return self._peer

    def time_remaining(self) -> float | None:
        """Seconds until the client waits no more; None where it waits for ever."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def is_active(self) -> bool:
        """Whether the call still is."""
        return not self._is_over

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Be told of the call's end; False, and never told, if it is over."""
        with _LOCK:
            if not self._is_over:
                self._callbacks.append(callback)
            return not self._is_over

    def over(self) -> None:
        """The call is over: whoever asked to be told is told, in this thread."""
        if self._is_over:
            return
        with _LOCK:
            self._is_over = True
            callbacks, self._callbacks = self._callbacks, []
        self._cancel = None  # which would keep the call, and its message, until the next collection
        for callback in callbacks:
            try:
                callback()
            except Exception:  # noqa: BLE001 - the others are told, and the loop goes on
                _log.exception("what was told of a call's end met a bug")

    def cancel(self) -> None:
        """End the call at once."""
        cancel = self._cancel
        if cancel is not None:
            cancel()

    def set_code(self, code: Any) -> None:
        """End it with this status."""
        self.code = code

    def set_details(self, details: str) -> None:
        """And this reason."""
        self.said = details

    def abort(self, code: Any, details: str) -> NoReturn:
        """End the call.

        Raises:
            Aborted: always.
        """
        self.code, self.said = code, details
        raise Aborted


_LOCK = threading.Lock()
"""Of all calls: it is held for a moment."""
