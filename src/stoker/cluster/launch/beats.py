"""What a worker tells its launcher: one message of JSON a second, over a socket that it inherits."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

FD_VARIABLE = "STOKER_HEARTBEAT_FD"
"""Environment variable: the descriptor of the worker's end of the socket."""

EVERY_S = 1.0
"""Pause between two beats, seconds."""

Phase = Literal["start", "train", "validate", "save", "serve", "done"]
"""What a worker is at. Only in `train` must its step move on within the watchdog's time; what
serves a parameter-server's chief has no steps of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """One sign of life."""

    rank: int
    """Who."""

    phase: Phase
    """At what."""

    step: int
    """Optimizer updates done."""

    at_s: float
    """The worker's monotonic clock, seconds."""

    line: str = ""
    """What it last said about how far it is."""

    share: float | None = None
    """How far that is, of 1; None where nobody knows."""

    def to_message(self) -> bytes:
        """The beat as it is sent."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()


def read_beat(message: bytes) -> Beat:
    """The beat that a message holds."""
    return Beat(**json.loads(message))
