"""Training by several processes of one machine: start, watch, end and restart them."""

from stoker.cluster.launch.restarts import Launched, LaunchSettings, WorkerFailed, launch

__all__ = ["LaunchSettings", "Launched", "WorkerFailed", "launch"]
