"""Load from the other core: wrk for HTTP, h2load for gRPC; every answer is counted."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from servers import CLIENT_CORE, HERE, Server

_WARM_S = 1
"""Before the first window of a load, seconds; wrk counts in whole ones."""


_LONGEST_S = 30
"""A server that answers nothing in so long is not measured."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """What one server did in one window."""

    per_s: float
    """Answers a second."""

    mean_ms: float
    """From a request to its answer."""

    p50_ms: float | None = None
    p99_ms: float | None = None
    """None by h2load, which has the mean only."""

    client_share: float
    """CPU of the client, as a share of its core."""

    server_share: float
    """CPU of the server, as a share of one core."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is sent over and over."""

    path: str
    body: bytes
    headers: Mapping[str, str]


def by_wrk(
    server: Server, request: Request, *, connections: int, seconds: int, warm: bool, scratch: Path
) -> Window:
    """Load a server that runs, closed loop.

    Args:
        server: The server that gets the load.
        request: What, over and over.
        connections: Each sends on when it has its answer.
        seconds: Of the window.
        warm: Whether it was under this load before.
        scratch: A folder for the body.

    Raises:
        RuntimeError: an answer was not 2xx, or a connection failed: the run is void.
    """
    body = scratch / "body"
    body.write_bytes(request.body)
    headers = [f"{name}: {value}" for name, value in request.headers.items()]
    url = f"http://127.0.0.1:{server.port}{request.path}"

    def run(window_s: int, *, strict: bool) -> tuple[dict[str, float], float, float]:
        command = ["wrk", "-t1", f"-c{connections}", f"-d{window_s}s", "--timeout", "60s"]
        command += ["-s", str(HERE / "load.lua"), url, "--", str(body), str(int(strict)), *headers]
        before_s = server.cpu_s()
        output, errors, client_s = _run(command)
        found = re.search(r"^JSON (.*)$", output, re.MULTILINE)
        if found is None or errors:
            raise RuntimeError(f"{server.name}{request.path}: {errors or output}")
        return json.loads(found[1]), client_s, server.cpu_s() - before_s

    if not warm:  # wrk alone takes 3xx for success, and to look at each status costs it time
        run(_WARM_S, strict=True)
    found, client_s, server_s = run(seconds, strict=False)
    while not found["requests"] and not found["failed"] and seconds < _LONGEST_S:
        seconds *= 2  # slow is not wrong: it gets the time for one answer
        found, client_s, server_s = run(seconds, strict=False)
    took_s = found["took_us"] / 1e6
    if found["failed"] or not found["requests"]:
        raise RuntimeError(f"{server.name}{request.path}: not every answer was 2xx: {found}")
    return Window(
        per_s=found["requests"] / took_s,
        mean_ms=found["mean_us"] / 1e3,
        p50_ms=found["p50_us"] / 1e3,
        p99_ms=found["p99_us"] / 1e3,
        client_share=client_s / took_s,
        server_share=server_s / took_s,
    )


GRPC_HEAD = struct.Struct(">BI")
"""Before each message: whether it is compressed, and its length."""


def by_h2load(
    server: Server,
    *,
    port: int,
    method: str,
    message: bytes,
    answer_bytes: int,
    connections: int,
    seconds: int,
    scratch: Path,
) -> Window:
    """Load a gRPC server that runs, closed loop; one call under way on each connection.

    Raises:
        RuntimeError: a call failed: a refusal has no message, and so the bytes would be fewer.
    """
    body = scratch / "message"
    body.write_bytes(GRPC_HEAD.pack(0, len(message)) + message)
    command = ["h2load", "-t1", f"-c{connections}", "-m1", "-D", str(seconds)]
    command += [f"--warm-up-time={_WARM_S}", "-d", str(body)]
    command += ["-H", "content-type: application/grpc", "-H", "te: trailers"]
    before_s = server.cpu_s()
    output, _, client_s = _run([*command, f"http://127.0.0.1:{port}{method}"])
    server_s, took_s = server.cpu_s() - before_s, seconds + _WARM_S
    counted = _numbers(r"requests: .*?(\d+) done, (\d+) succeeded", output)
    data = _numbers(r"traffic: .*\((\d+)\) data", output)[0]
    good = _numbers(r"status codes: (\d+) 2xx, (\d+) 3xx, (\d+) 4xx, (\d+) 5xx", output)
    expected = counted[1] * (GRPC_HEAD.size + answer_bytes)
    if not counted[1] or any(good[1:]) or data < 0.99 * expected:
        raise RuntimeError(f"{server.name}: not every call was answered:\n{output}")
    mean = re.search(r"time for request:\s+\S+\s+\S+\s+([\d.]+)(us|ms|s)", output)
    if mean is None:
        raise RuntimeError(f"h2load says nothing of latency:\n{output}")
    mean_ms = float(mean[1]) * {"us": 1e-3, "ms": 1.0, "s": 1e3}[mean[2]]
    return Window(
        per_s=counted[1] / seconds,
        mean_ms=mean_ms,
        client_share=client_s / took_s,
        server_share=server_s / took_s,
    )


def _run(command: Sequence[str]) -> tuple[str, str, float]:
    """Output, errors, and CPU seconds of a client on its own core."""
    before = os.times()
    done = subprocess.run(
        ["taskset", "-c", str(CLIENT_CORE), *command], capture_output=True, text=True, check=False
    )
    after = os.times()
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stdout}{done.stderr}")
    used_s = after.children_user + after.children_system
    return done.stdout, done.stderr, used_s - before.children_user - before.children_system


def _numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    if found is None:
        raise RuntimeError(f"h2load does not say {pattern!r}:\n{text}")
    return [int(number) for number in found.groups()]
