"""Child processes: started, listened to, and ended together with everything that they started."""

from stoker.cluster.processes.child import (
    Child,
    Lines,
    ProcessOptions,
    how_it_ended,
    last_line,
    refused,
)

__all__ = ["Child", "Lines", "ProcessOptions", "how_it_ended", "last_line", "refused"]
