"""Who takes part: each server started once, checked against ours, and stopped until it is its turn."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import models
import numpy as np
import servers
from load import Request, Window, by_wrk
from servers import Server

_JSON = {"Content-Type": "application/json"}
_TOLERANCE = 1e-5
"""Most by which an answer may differ from ours: softmax of float32, kernels of other batch sizes."""

Contest = dict[str, list[Window]]
"""What each contestant did in each round."""


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One way to ask one server."""

    name: str
    server: Server
    request: Request
    read: Callable[[bytes], Any] = lambda body: json.loads(body)["predictions"]
    """The rows in the body of an answer."""


def answer(contestant: Contestant) -> bytes:
    """What it says to one request.

    Raises:
        ConnectionError: another status than 200.
    """
    request = contestant.request
    status, body = servers.post(contestant.server.port, request.path, request.body, request.headers)
    if status != 200:
        raise ConnectionError(f"{contestant.name}{request.path} answers {status}: {body[:300]!r}")
    return body


@dataclass
class Lineup:
    """The servers that have been started so far; a later case finds them again."""

    scratch: Path
    peers: Sequence[str]
    stack: ExitStack
    grpc_port: int = 0
    _found: dict[str, Server] = field(default_factory=dict)

    @property
    def root(self) -> Path:
        """The repository of both models."""
        return self.scratch / "models"

    def start(self, names: Sequence[str]) -> None:
        """Start what does not run yet; each is stopped when it answers about both models.

        One after the other: they share a core, and Ray gives up where its start takes long.
        """
        for name in names:
            if name in self._found:
                continue
            server = self._found[name] = self._started(name)
            self.stack.callback(server.stop)
            sys.stderr.write(f"bench-serve: starting {server.name}\n")
            for model in ("mlp", "cnn"):
                for contestant in self.contestants(model, [name]):
                    server.wait_until(lambda contestant=contestant: bool(answer(contestant)))
            server.signal(signal.SIGSTOP)

    def add(self, name: str, server: Server, ready: Callable[[], bool]) -> None:
        """Add a server that is not a peer."""
        self.stack.callback(server.stop)
        server.wait_until(ready)
        server.signal(signal.SIGSTOP)
        self._found[name] = server

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> Server:
        return self._found[name]

    def contestants(self, model: str, names: Sequence[str]) -> list[Contestant]:
        """Every way to ask these servers about the model's row, as JSON."""
        model_request = models.request_of(model)
        return [each for name in names for each in _ways(name, self._found[name], model_request)]

    def _started(self, name: str) -> Server:
        log = self.scratch / f"{name}.log"
        if name != "stoker":
            return servers.peer(name, self.root, log)
        server, self.grpc_port = servers.ours(self.root, log)
        return server


def _ways(name: str, server: Server, model_request: models.ModelRequest) -> list[Contestant]:
    model = model_request.model

    def way(path: str, *, shown: str = "", infer: bool = False, **more: Any) -> Contestant:
        body = model_request.infer if infer else model_request.instances
        request = Request(path=path, body=body, headers=_JSON)
        return Contestant(name=server.name + shown, server=server, request=request, **more)

    if name == "stoker":
        return [way(f"/v1/models/{model}:predict")]
    if name == "kserve":
        flat = way(f"/v2/models/{model}/infer", shown=", v2", infer=True, read=inferred)
        return [way(f"/v1/models/{model}:predict"), flat]
    if name == "mlserver":
        paths = {"": model, ", batching": f"{model}-batched"}
        return [
            way(f"/v2/models/{path}/infer", shown=shown, infer=True, read=inferred)
            for shown, path in paths.items()
        ]
    if name == "bentoml":
        paths = {"": model, ", batching": f"{model}_batched"}
        return [way(f"/{path}", shown=shown, read=json.loads) for shown, path in paths.items()]
    return [way(f"/{model}")]


def inferred(body: bytes) -> Any:
    """The rows in an answer of the Open Inference Protocol."""
    output = json.loads(body)["outputs"][0]
    return np.reshape(output["data"], output["shape"])


def check_equal(contestants: Sequence[Contestant]) -> None:
    """Hold every answer to that of the first.

    Raises:
        RuntimeError: one differs.
    """
    expected = None
    for contestant in contestants:
        with contestant.server.running():
            found = np.asarray(contestant.read(answer(contestant)), np.float64)
        expected = found if expected is None else expected
        if found.shape != expected.shape or not np.allclose(found, expected, atol=_TOLERANCE):
            raise RuntimeError(f"{contestant.name} answers {found}, ours is {expected}")


def contest(
    contestants: Sequence[Contestant],
    *,
    connections: int,
    seconds: int,
    rounds: int,
    scratch: Path,
) -> Contest:
    """Load one after the other, and again; who begins is another in each round."""
    found: Contest = {contestant.name: [] for contestant in contestants}
    for number in range(rounds):
        first = number % len(contestants)
        for contestant in [*contestants[first:], *contestants[:first]]:
            with contestant.server.running():
                window = by_wrk(
                    contestant.server,
                    contestant.request,
                    connections=connections,
                    seconds=seconds,
                    warm=number > 0,
                    scratch=scratch,
                )
            found[contestant.name].append(window)
            sys.stderr.write(
                f"bench-serve: {connections:3d} {contestant.name}: {shown([window])}\n"
            )
    return found


def middle(windows: Sequence[Window], what: str = "per_s") -> float:
    """The median over the rounds."""
    return float(np.median([getattr(window, what) for window in windows]))


def ratio(ours: Sequence[Window], theirs: Sequence[Window]) -> float:
    """The median of the rounds' ratios."""
    pairs = zip(ours, theirs, strict=True)
    return float(np.median([mine.per_s / other.per_s for mine, other in pairs]))


def best(found: Contest, leave_out: Sequence[str]) -> str:
    """The quickest contestant but for some."""
    return max(set(found) - set(leave_out), key=lambda name: middle(found[name]))


def shown(windows: Sequence[Window]) -> str:
    """Windows in words."""
    per_s = [window.per_s for window in windows]
    mean = f"mean {middle(windows, 'mean_ms'):.3g} ms"
    if windows[0].p99_ms is not None:
        mean = f"p50 {middle(windows, 'p50_ms'):.3g} ms, p99 {middle(windows, 'p99_ms'):.3g} ms"
    return (
        f"{middle(windows):,.4g} a second ({min(per_s):,.4g} to {max(per_s):,.4g}), "
        f"{mean}, server {middle(windows, 'server_share'):.0%} and client "
        f"{middle(windows, 'client_share'):.0%} of a core"
    )
