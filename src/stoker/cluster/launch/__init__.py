"""Trains with several processes on one machine: starts, watches, ends and restarts them."""

from stoker.cluster.launch.restarts import Launched, LaunchSettings, WorkerFailed, launch

__all__ = ["LaunchSettings", "Launched", "WorkerFailed", "launch"]
