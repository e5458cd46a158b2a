"""A server in this process with the paths of rollouts, and a client of it."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.unit.rollout.test_rollout_operations import saved_model

from stoker.registry.repository import Repository
from stoker.rollout.operations import ModelRollouts
from stoker.rollout.rest import RolloutRoutes
from stoker.serve.config import ServeConfig
from stoker.serve.process.server import Server

ADMIN, PREDICT = "admin-key-of-anna-0123456789", "predict-key-of-argo-0123456789"
KEYS = f"""
- {{name: anna, role: admin, key: {ADMIN}}}
- {{name: argo, role: predict, key: {PREDICT}}}
"""


@dataclass
class Site:
    """A server, and a client of it."""

    port: int
    root: Path

    def send(
        self, path: str, body: Any = None, *, method: str = "", key: str = ADMIN, **headers: str
    ) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        try:
            connection.request(method or ("GET" if raw is None else "POST"), path, raw, headers)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        return response.status, json.loads(text) if text.startswith("{") else text

    def rollouts(self, model: str) -> ModelRollouts:
        return ModelRollouts(self.root, model)


def site(folder: Path, *, keys: bool) -> Iterator[Site]:
    repository = Repository(folder / "models")
    for model in ("taxi", "other"):
        for noise in "ab":
            repository.push(saved_model(folder / model / noise, noise=noise), model)
    (folder / "keys.yaml").write_text(KEYS)
    config = ServeConfig(
        root=repository.root,
        rest_port=0,
        grpc_port=0,
        poll_s=0.1,
        lame_duck_s=0.0,
        drain_s=1.0,
        keys_file=folder / "keys.yaml" if keys else None,
    )
    server = Server(config, extra=RolloutRoutes())
    server.start()
    try:
        end_s = time.monotonic() + 30.0
        while set(server.models.names()) != {"taxi", "other"}:
            assert time.monotonic() < end_s
            time.sleep(0.05)
        yield Site(port=server.rest_port, root=repository.root)
    finally:
        server.stop()
