"""Liveness and readiness probes at fixed paths, without a key."""

from __future__ import annotations

import json
from collections.abc import Callable

from stoker.serve.dataplane.plane import DataPlane
from stoker.serve.rest.messages import Answer


def _live(_plane: DataPlane) -> Answer:
    return Answer(body='{"live": true}')


def _ready(plane: DataPlane) -> Answer:
    why = plane.unready()
    if why:
        return Answer(status=503, body=json.dumps({"ready": False, "reason": why}))
    return Answer(body='{"ready": true}')


PROBES: dict[str, Callable[[DataPlane], Answer]] = {
    "/livez": _live,
    "/readyz": _ready,
    "/v2/health/live": _live,
    "/v2/health/ready": _ready,
}
"""Path -> what answers it."""
