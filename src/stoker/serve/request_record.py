"""What is known of one request when it is over: for the access log and for traces."""

from __future__ import annotations

import time
from dataclasses import dataclass, field


@dataclass(kw_only=True, slots=True)
class Trail:
    """Filled in by whoever learns of it, from the interface down to the queue."""

    began_s: float = field(default_factory=time.monotonic)
    """When the request came, by the monotonic clock."""

    model: str = ""
    """The model that was asked for; as the client wrote it."""

    version: int | None = None
    """The version that answered."""

    signature: str = ""
    """The signature that was asked for, or those of several tasks."""

    rows: int = 0
    """Rows of its inputs, 0 where it was refused before they were known."""

    code: str = ""
    """The canonical code of its end, empty where it did not come to the model."""

    queued_s: float = 0.0
    """Time that it waited for its model."""

    run_began_s: float = 0.0
    """When its model began, by the monotonic clock; 0 where it did not."""

    run_s: float = 0.0
    """Time inside the model."""

    def ran(self, began_s: float, ended_s: float, *, came_s: float) -> None:
        """Its model has run.

        Args:
            began_s: When the run began, by the monotonic clock.
            ended_s: When it ended.
            came_s: When the request stood before the model.
        """
        self.queued_s += max(began_s - came_s, 0.0)
        self.run_began_s = self.run_began_s or began_s
        self.run_s += ended_s - began_s
