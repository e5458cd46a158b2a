"""Heartbeats of a worker to its launcher: one JSON message a second, over an inherited socket."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

FD_VARIABLE = "STOKER_HEARTBEAT_FD"
"""Environment variable: the descriptor of the worker's end of the socket."""

EVERY_S = 1.0
"""Pause between two heartbeats, seconds."""

Phase = Literal["start", "train", "validate", "save", "serve", "done"]
"""What a worker does. Only in `train` must its step grow within the limit of the watchdog; a process
that serves the chief of parameter servers has no steps of its own."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Beat:
    """One heartbeat."""

    rank: int
    """Rank of the worker."""

    phase: Phase
    """What the worker does."""

    step: int
    """Number of optimizer updates."""

    at_s: float
    """The worker's monotonic clock, seconds."""

    line: str = ""
    """Its last progress line."""

    share: float | None = None
    """Progress from 0 to 1; None if unknown."""

    def to_message(self) -> bytes:
        """The message to send."""
        return json.dumps(asdict(self), separators=(",", ":")).encode()


def read_beat(message: bytes) -> Beat:
    """The heartbeat in a message."""
    return Beat(**json.loads(message))
