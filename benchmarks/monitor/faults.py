"""Faults of a watched machine, and the alert that each raises."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path

from player import Inbox, Machine

from stoker.monitor.settings import RuleSettings
from stoker.monitor.stack.processes import Stack
from stoker.monitor.stack.wiring import Receiver, Wiring

TIME_SCALE = 60.0

FAULTS: dict[str, Callable[[Machine], None]] = {
    "StokerInputBound": lambda found: found.training.change("stoker_train_input_wait_ratio", 0.6),
    "StokerErrorBudgetBurn": lambda found: found.server.change('status="UNAVAILABLE"', 20.0),
    "StokerRolledBack": lambda found: found.server.change('phase="rolled back"', 1.0),
    "StokerGpuIdle": lambda found: found.exporter.change("stoker_gpu_sm_active_ratio", 0.01),
    "StokerTargetDown": lambda found: found.end_second_server.close(),
}
"""Alert -> its fault."""


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def stack_of(folder: Path) -> Stack:
    """Prometheus and Alertmanager on free ports."""
    return Stack(folder=folder, prometheus_port=free_port(), alertmanager_port=free_port())


def wiring_of(found: Machine, notes: Inbox) -> Wiring:
    """Watches the machine, in seconds instead of minutes."""
    return Wiring(
        runs=(str(found.runs),),
        servers=(found.second_server,),
        exporters=(found.exporter_address,),
        rules=RuleSettings(time_scale=TIME_SCALE),
        receiver=Receiver(webhook=notes.url),
    )


def fire_all(found: Machine, notes: Inbox, *, timeout_s: float) -> dict[str, float]:
    """Plant every fault; alert -> seconds until the webhook has it, without those that do not come."""
    planted_s = {}
    for alert, plant in FAULTS.items():
        planted_s[alert] = time.monotonic()
        plant(found)
    came = notes.wait_for(set(FAULTS), timeout_s)
    return {alert: notes.seen_s[alert] - planted_s[alert] for alert in sorted(came)}
