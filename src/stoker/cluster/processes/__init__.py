"""Child processes: starts them, reads their output, and ends them together with everything that they started."""

from stoker.cluster.processes.child import (
    Child,
    Lines,
    ProcessOptions,
    how_it_ended,
    last_line,
    refused,
)

__all__ = ["Child", "Lines", "ProcessOptions", "how_it_ended", "last_line", "refused"]
