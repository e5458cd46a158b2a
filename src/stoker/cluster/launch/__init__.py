"""Several processes that train together on one machine: started, watched, ended, started again."""

from stoker.cluster.launch.restarts import Launched, LaunchSettings, WorkerFailed, launch

__all__ = ["LaunchSettings", "Launched", "WorkerFailed", "launch"]
