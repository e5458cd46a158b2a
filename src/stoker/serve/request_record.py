"""What is known of one finished request: for the access log and for traces."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker.serve.routing import Headers, Route, no_headers

VERSION_HEADER = "stoker-model-version"
"""The HTTP header, and the key in gRPC's trailing metadata, that names the version that answered."""


@dataclass(kw_only=True, slots=True)
class RequestRecord:
    """Facts about one request. Every layer from the interface to the queue adds what it knows."""

    began_s: float = field(default_factory=time.monotonic)
    """Arrival of the request, seconds of the monotonic clock."""

    model: str = ""
    """The requested model, as the client wrote it."""

    version: int | None = None
    """The version that answered."""

    signature: str = ""
    """The requested signature, or those of several tasks."""

    rows: int = 0
    """Rows of its inputs; 0 if it was refused before they were known."""

    code: str = ""
    """The canonical gRPC code of its result; empty if it did not reach the model."""

    queued_s: float = 0.0
    """Time in the queue, seconds."""

    run_began_s: float = 0.0
    """Start of the model call, seconds of the monotonic clock; 0 if there was none."""

    run_s: float = 0.0
    """Time in the model, seconds."""

    headers: Headers = no_headers
    """Its headers or metadata."""

    patience_s: float = math.inf
    """How long its client waits, seconds."""

    route: Route | None = None
    """Where a rollout sent it; the event loop may have decided that before a thread does."""

    outputs: Mapping[str, np.ndarray[Any, Any]] | None = None
    """The model's outputs, until they are counted."""

    def ran(self, began_s: float, ended_s: float, *, came_s: float) -> None:
        """Record a model call.

        Args:
            began_s: Start of the call, seconds of the monotonic clock.
            ended_s: Its end.
            came_s: When the request entered the queue.
        """
        self.queued_s += max(began_s - came_s, 0.0)
        self.run_began_s = self.run_began_s or began_s
        self.run_s += ended_s - began_s
