"""Child processes: started, listened to, and ended together with everything that they started."""

from stoker.cluster.processes.child import Child, how_it_ended, refused
from stoker.cluster.processes.output import Lines, last_line

__all__ = ["Child", "Lines", "how_it_ended", "last_line", "refused"]
