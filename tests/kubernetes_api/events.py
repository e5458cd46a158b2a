"""Events: what happened to an object, as `kubectl describe` shows it; the same one again counts."""

from __future__ import annotations

from tests.kubernetes_api.resources import EVENTS, Object
from tests.kubernetes_api.storage import Storage, now, suffix


def record(
    storage: Storage, item: Object, reason: str, message: str, *, source: str, warning: bool = False
) -> None:
    """Record an event of an object."""
    metadata = item["metadata"]
    namespace = metadata.get("namespace", "default")
    with storage.changed:
        for each in storage.items(EVENTS, namespace):
            about = each["involvedObject"]
            if (about["uid"], each["reason"], each["message"]) == (
                metadata["uid"],
                reason,
                message,
            ):
                if each["lastTimestamp"] == now():  # a controller that looks many times a second
                    return
                counted = {"count": each["count"] + 1, "lastTimestamp": now()}
                storage.update(EVENTS, each | counted)
                return
        storage.create(
            EVENTS,
            {
                "apiVersion": "v1",
                "kind": "Event",
                "metadata": {"name": f"{metadata['name']}.{suffix(16)}", "namespace": namespace},
                "involvedObject": {
                    "kind": item["kind"],
                    "apiVersion": item["apiVersion"],
                    "name": metadata["name"],
                    "namespace": namespace,
                    "uid": metadata["uid"],
                },
                "reason": reason,
                "message": message,
                "type": "Warning" if warning else "Normal",
                "count": 1,
                "firstTimestamp": now(),
                "lastTimestamp": now(),
                "source": {"component": source},
                "reportingComponent": source,
                "reportingInstance": "",
            },
        )
