"""Keeps an event loop polling for a moment before it sleeps, because waking up takes longer than a small answer."""

from __future__ import annotations

import asyncio
import time

BUSY_POLL_S = 100e-6
"""How long the loop polls before it sleeps, seconds; about the time in which a client sends its next request."""


class BusyPoll:
    """Keeps one event loop from sleeping. Only the loop's thread may use it."""

    def __init__(self) -> None:
        """Start in a state in which the loop may sleep."""
        self._is_polling, self._until_s = False, 0.0

    def stay(self, loop: asyncio.AbstractEventLoop) -> None:
        """Keep the loop polling without sleep for `BUSY_POLL_S` from now."""
        self._until_s = time.monotonic() + BUSY_POLL_S
        if not self._is_polling:
            self._is_polling = True
            loop.call_soon(self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_polling = time.monotonic() < self._until_s
        if self._is_polling:
            loop.call_soon(self._look, loop)
