"""Follows objects of the API: lists them, then watches changes; lists them again if the watch breaks or is too old."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from stoker.core.errors import UserError
from stoker.jobs.providers.kubernetes.client import READ_S, Cluster
from stoker.jobs.providers.kubernetes.problems import GONE, AnswerLost, Gone

AGAIN_S = 1.0
"""Pause after a broken watch, seconds."""

ROUND_S = 60
"""Time after which the server ends a watch, seconds; a connection that hangs is noticed `READ_S` later."""


def watch(cluster: Cluster, path: str, **query: str) -> Iterator[dict[str, Any]]:
    """Yield all objects, and then, without end, each object that is added or changed.

    An object may be yielded more than once. Deletions are not reported.

    Raises:
        AnswerLost: the API does not answer; the caller may try again.
        UserError: the API refuses.
    """
    while True:
        found, version = cluster.all_with_version(path, **query)
        yield from found
        try:
            while True:
                request = query | {
                    "watch": "true",
                    "resourceVersion": version,
                    "timeoutSeconds": str(ROUND_S),
                    "allowWatchBookmarks": "true",
                }
                for line in cluster.stream(path, silent_s=ROUND_S + READ_S, **request):
                    kind, changed = _changed(line)
                    version = changed["metadata"].get("resourceVersion", version)
                    if kind in ("ADDED", "MODIFIED"):
                        yield changed
        except Gone:
            continue
        except AnswerLost:
            time.sleep(AGAIN_S)  # more frequent requests would not help an overloaded server


def _changed(line: str) -> tuple[str, dict[str, Any]]:
    try:
        event = json.loads(line)
        kind, found = event["type"], event["object"]
    except (ValueError, KeyError, TypeError):
        raise AnswerLost("a watch must end with a complete line", got=line[:80]) from None
    if kind == "ERROR":
        if found.get("code") == GONE:
            raise Gone("the watch must continue from a version that the cluster still has")
        raise UserError("the cluster must send changes", got=str(found.get("message", "")))
    return str(kind), dict(found)
