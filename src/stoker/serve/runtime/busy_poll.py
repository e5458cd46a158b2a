"""A loop that looks for what comes next before it sleeps: waking costs more than a small answer."""

from __future__ import annotations

import asyncio
import time

AWAKE_S = 100e-6
"""How long the loop looks before it sleeps; about what a client takes to ask again."""


class Awake:
    """Keeps one loop from sleeping; used by its thread only."""

    def __init__(self) -> None:
        """It may sleep."""
        self._is_awake, self._until_s = False, 0.0

    def stay(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let the loop look for what comes, without sleeping, for `AWAKE_S` from now."""
        self._until_s = time.monotonic() + AWAKE_S
        if not self._is_awake:
            self._is_awake = True
            loop.call_soon(self._look, loop)

    def _look(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_awake = time.monotonic() < self._until_s
        if self._is_awake:
            loop.call_soon(self._look, loop)
