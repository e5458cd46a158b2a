"""Reads the state of the started programs: targets, firing alerts, and problems such as a full disk."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stoker.monitor.stack.processes import data_folder, is_ready
from stoker.monitor.stack.state import Started

_TAIL_BYTES = 1 << 16
_MIN_FREE_BYTES = 1 << 20
"""Minimum free space, bytes: with less, the next write of Prometheus may fail. Each write takes at least 32 KiB."""

_FULL = b"no space left on device"


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramStatus:
    """The state of a program that `up` started."""

    name: str
    address: str
    pid: int
    state: str
    """`ready`, `starting` or `ended`."""
    problem: str
    """One line about a problem; empty: none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Status:
    """The state of both programs, and the targets and alerts of Prometheus."""

    programs: tuple[ProgramStatus, ...]
    targets: tuple[tuple[str, str, str], ...]
    """For each target: job, address, and `up` or why it cannot be scraped."""
    alerts: tuple[tuple[str, str], ...]
    """For each firing alert: name and summary."""


def read_status(started: tuple[Started, ...]) -> Status:
    """Query the programs; if Prometheus does not answer, the targets and alerts are empty."""
    programs = tuple(_program(each) for each in started)
    prometheus = next((each for each in programs if each.name == "Prometheus"), None)
    if prometheus is None or prometheus.state != "ready":
        return Status(programs=programs, targets=(), alerts=())
    targets = _get(prometheus.address, "/api/v1/targets?state=active").get("activeTargets", [])
    alerts = _get(prometheus.address, "/api/v1/alerts").get("alerts", [])
    return Status(
        programs=programs,
        targets=tuple(
            (
                each["labels"]["job"],
                each["labels"]["instance"],
                "up" if each["health"] == "up" else each["lastError"] or each["health"],
            )
            for each in targets
        ),
        # A set: alerts for different windows of the same objective have the same name and summary.
        alerts=tuple(
            sorted(
                {
                    (each["labels"]["alertname"], each["annotations"].get("summary", ""))
                    for each in alerts
                    if each["state"] == "firing"
                }
            )
        ),
    )


def _program(started: Started) -> ProgramStatus:
    state = "starting" if started.runs else "ended"
    if started.runs and is_ready(started.address):
        state = "ready"
    return ProgramStatus(
        name=started.name,
        address=started.address,
        pid=started.pid,
        state=state,
        problem=_problem(started, state),
    )


def _problem(started: Started, state: str) -> str:
    folder = Path(started.log).parent
    for each in (data_folder(folder, started.name), folder):
        # Check the disk first: if it is full, the log cannot show that.
        with contextlib.suppress(OSError):
            found = os.statvfs(each)
            if found.f_bavail * found.f_frsize < _MIN_FREE_BYTES:
                return f"the disk of {each} is full: new data is lost; free some space"
    try:
        with Path(started.log).open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - _TAIL_BYTES))
            is_full = _FULL in log.read()
    except OSError as error:
        return f"its log {started.log} cannot be read: {error.strerror}"
    if is_full:
        return f"the disk of {Path(started.log).parent} was full: data is missing; free some space"
    return (
        f"it has ended: see {started.log}, then run stoker monitor down and up"
        if state == "ended"
        else ""
    )


def _get(address: str, path: str) -> dict[str, Any]:
    connection = http.client.HTTPConnection(address, timeout=5.0)
    try:
        connection.request("GET", path)
        return dict(json.loads(connection.getresponse().read())["data"])
    except (OSError, http.client.HTTPException, ValueError, KeyError):
        return {}
    finally:
        connection.close()
