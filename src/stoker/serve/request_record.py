"""Facts about a request, for the access log and for traces."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from stoker.serve.routing import Headers, Route, no_headers

VERSION_HEADER = "stoker-model-version"
"""Name of the HTTP header and of the key in gRPC's trailing metadata that has the number of the version that
answered."""


@dataclass(kw_only=True, slots=True)
class RequestRecord:
    """Facts about one request. Every layer, from the interface to the queue, adds the facts that it knows."""

    began_s: float = field(default_factory=time.monotonic)
    """Arrival of the request, seconds of the monotonic clock."""

    model: str = ""
    """The requested model, as the client wrote it."""

    version: int | None = None
    """The version that answered; None: the request reached no version."""

    signature: str = ""
    """The requested signature; several tasks: their signatures, separated by commas."""

    rows: int = 0
    """Number of rows of the inputs; 0 if the request was refused before it was known."""

    code: str = ""
    """The name of the gRPC status code with which the request ended; empty if it did not reach the dataplane."""

    queued_s: float = 0.0
    """Time in the queue, seconds."""

    run_began_s: float = 0.0
    """Start of the model call, seconds of the monotonic clock; 0: the model was not called."""

    run_s: float = 0.0
    """Time in the model, seconds."""

    headers: Headers = no_headers
    """Returns a header or a metadata value by its name."""

    patience_s: float = math.inf
    """How long the client waits for the answer, seconds."""

    route: Route | None = None
    """Where a rollout sent the request; None: no rollout decided. The event loop may have set it before a thread
    answers."""

    outputs: Mapping[str, np.ndarray[Any, Any]] | None = None
    """The model's outputs, until the rollout has counted them; None: not kept."""

    def ran(self, began_s: float, ended_s: float, *, came_s: float) -> None:
        """Record a model call.

        Args:
            began_s: Start of the call, seconds of the monotonic clock.
            ended_s: End of the call, seconds of the monotonic clock.
            came_s: When the request entered the queue, seconds of the monotonic clock.
        """
        self.queued_s += max(began_s - came_s, 0.0)
        self.run_began_s = self.run_began_s or began_s
        self.run_s += ended_s - began_s
