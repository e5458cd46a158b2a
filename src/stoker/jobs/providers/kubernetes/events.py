"""Reads the events of a job and its pods, in their order."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from stoker.jobs.provider import JobEvent
from stoker.jobs.providers.kubernetes.state import time_s


def events_of(listed: Iterable[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """Return the events of a job's objects, oldest first.

    Args:
        listed: All events of the namespace.
        name: Name of the job's objects; the names of objects that the cluster creates for them begin with it.
    """
    found = []
    for event in listed:
        about = str((event.get("involvedObject") or {}).get("name", ""))
        if about == name or about.startswith(f"{name}-"):
            found.append(event)
    return sorted(found, key=lambda event: (_event_s(event), _version(event)))


def job_event(event: dict[str, Any]) -> JobEvent:
    """Convert an event to the common form of all targets."""
    about = event.get("involvedObject") or {}
    return JobEvent(
        at_s=_event_s(event),
        about=f"{about.get('kind', '')} {about.get('name', '')}".strip(),
        reason=str(event.get("reason", "")),
        message=" ".join(str(event.get("message", "")).split()),
        times=int(event.get("count") or 1),
    )


def _version(event: dict[str, Any]) -> int:
    """Return a number that grows with each change in the cluster; times of events have only whole seconds."""
    text = str(event["metadata"].get("resourceVersion", ""))
    return int(text) if text.isdecimal() else 0


def _event_s(event: dict[str, Any]) -> float:
    series = event.get("series") or {}
    for text in (
        event.get("lastTimestamp"),
        series.get("lastObservedTime"),
        event.get("eventTime"),
        event.get("firstTimestamp"),
        event["metadata"].get("creationTimestamp"),
    ):
        if (found := time_s(text)) is not None:
            return found
    return 0.0
