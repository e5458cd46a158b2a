"""What clients of one model notice while another is loaded."""

from __future__ import annotations

import http.client
import json
import shutil
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import models
import numpy as np
import servers
from figures import Figure, figure
from lineup import Lineup

_RATE_PER_S = 400.0
_LOADS_A_ROUND = 3

_WARM_LOADS = 2
"""The first imports what loading needs; from the second on two versions are in memory at once. Memory
that a virtual machine has not had before comes from its host, and stops the whole core meanwhile."""

_LOOK_S = 0.02
"""Between two looks at the loading model; also while nothing loads, so that both are loaded alike."""

_POLL_S = "0.2"
_LOAD_S = 120.0
"""Longest that a version may take to load."""

_LARGE = (256, 512, 512, 1024, 1024)
"""Filters of the model that is loaded: 71 MB of weights."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One request, by a monotonic clock."""

    due_s: float
    took_s: float
    """From when it was due."""


class Client(threading.Thread):
    """Asks on one connection by a schedule until it is stopped."""

    def __init__(self, port: int) -> None:
        """Args: port: of the server."""
        super().__init__(daemon=True)
        self._port = port
        self._over = threading.Event()
        self.samples: list[Sample] = []
        self.failure = ""

    def run(self) -> None:
        """Send requests; a late one is sent at once, and its wait counts."""
        request = models.request_of("mlp")
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        due_s = time.monotonic()
        while not self._over.is_set() and not self.failure:
            time.sleep(max(0.0, due_s - time.monotonic()))  # an open load: each at its time
            connection.request("POST", "/v1/models/mlp:predict", request.instances)
            answer = connection.getresponse()
            body = answer.read()
            if answer.status != 200:
                self.failure = f"{answer.status}: {body[:200]!r}"
            self.samples.append(Sample(due_s=due_s, took_s=time.monotonic() - due_s))
            due_s += 1 / _RATE_PER_S
        connection.close()

    def stop(self) -> None:
        """End it.

        Raises:
            RuntimeError: a request was not answered.
        """
        self._over.set()
        self.join()
        if self.failure:
            raise RuntimeError(f"a request failed while another model loaded: {self.failure}")


def states(port: int, model: str) -> dict[int, str]:
    """Version -> state; none where the model is not known yet."""
    status, body = servers.post(port, f"/v1/models/{model}", b"")
    if status != 200:
        return {}
    found = json.loads(body)["model_version_status"]
    return {int(each["version"]): each["state"] for each in found}


def swap(lineup: Lineup, *, seconds: int, rounds: int) -> list[Figure]:
    """Load versions of a large model one after the other, and ask the perceptron all the time."""
    root = lineup.scratch / "swap"
    shutil.copytree(lineup.root / "mlp", root / "mlp")
    waiting = lineup.scratch / "waiting"
    models.write_cnn(waiting / "1", filters=_LARGE, seed=3)
    with ExitStack() as stack:
        server, _ = servers.ours(root, lineup.scratch / "swap.log", "--poll-s", _POLL_S)
        stack.callback(server.stop)
        server.wait_until(lambda: servers.post(server.port, "/readyz", b"")[0] == 200)
        client = Client(server.port)
        client.start()
        quiet, loading = [], []
        for version in range(1, _LOADS_A_ROUND * rounds + _WARM_LOADS + 1):
            shutil.copytree(waiting / "1", waiting / "next")
            quiet.append(_look(server.port, seconds))
            loading.append(_loaded(server.port, waiting / "next", root / "large", version))
        client.stop()
    return _figures(client.samples, quiet[_WARM_LOADS:], loading[_WARM_LOADS:])


def _look(port: int, seconds: float) -> tuple[float, float]:
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < seconds:
        states(port, "large")
        time.sleep(_LOOK_S)  # a state of another process: it is looked at
    return begun_s, time.monotonic()


def _loaded(port: int, ready: Path, base: Path, version: int) -> tuple[float, float]:
    """From the first sight of a version until it is loaded and the one before it is gone."""
    base.mkdir(exist_ok=True)
    ready.rename(base / str(version))
    begun_s, until_s = 0.0, time.monotonic() + _LOAD_S
    while time.monotonic() < until_s:
        found = states(port, "large")
        if version in found and not begun_s:
            begun_s = time.monotonic() - _LOOK_S
        alive = {number for number, state in found.items() if state != "END"}
        if found.get(version) == "AVAILABLE" and alive == {version}:
            return begun_s, time.monotonic()
        time.sleep(_LOOK_S)  # a state of another process: it is looked at
    raise RuntimeError(f"version {version} was not loaded in {_LOAD_S:g} s: {found}")


def _within(samples: list[Sample], spans: list[tuple[float, float]]) -> np.ndarray:
    return np.array(
        [1e3 * s.took_s for s in samples if any(low <= s.due_s <= high for low, high in spans)]
    )


def _figures(
    samples: list[Sample],
    quiet: list[tuple[float, float]],
    loading: list[tuple[float, float]],
) -> list[Figure]:
    still, busy = _within(samples, quiet), _within(samples, loading)
    took_s = [high - low for low, high in loading]
    p99s_ms = [
        [float(np.percentile(_within(samples, [span]), 99)) for span in pair]
        for pair in zip(quiet, loading, strict=True)
    ]
    ratios = [while_ms / before_ms for before_ms, while_ms in p99s_ms]
    before_ms, while_ms = (float(np.median(column)) for column in zip(*p99s_ms, strict=True))
    how = (
        f"{_RATE_PER_S:g} requests a second, open loop, latency from when each was due; median of "
        f"{len(ratios)} pairs ({min(ratios):.3g} to {max(ratios):.3g}): p99 of {len(busy) / len(ratios):.0f} "
        f"requests while a version loads for {np.median(took_s):.3g} s, compared with the "
        f"{len(still) / len(ratios):.0f} just before, in which nothing loads; p50 {np.median(busy):.3g} "
        f"and {np.median(still):.3g} ms, all loads together p99 {np.percentile(busy, 99):.3g}, most "
        f"{busy.max():.3g} ms"
    )
    sys.stderr.write(f"bench-serve: {how}\n")
    return [
        figure(
            "MLP: p99 while another model loads",
            float(np.median(ratios)),
            "times",
            at_most=2.0,
            how=how,
        ),
        figure("MLP: p99 while nothing loads", before_ms, "ms", how=how),
        figure("MLP: p99 while another model loads, in ms", while_ms, "ms", how=how),
    ]
