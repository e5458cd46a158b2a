"""Two network namespaces joined by a link of known speed: two machines on one, as the kernel has it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "STOKER_BENCH_NAMESPACES"
"""Environment variable that makes a worker enter the namespace of its rank."""

NAMES = ("stoker-bench-0", "stoker-bench-1")
ADDRESSES = ("10.77.0.1", "10.77.0.2")
RATE = "1gbit"
BURST = "256kb"
QUEUE_MS = 50

_PROBE_BYTES = 100_000_000
_RECEIVE = """
import socket, time
with socket.create_server(("{address}", 5000)) as server:
    peer, _ = server.accept()
    seen, begun_s = 0, time.monotonic()
    while block := peer.recv(1 << 20):
        seen += len(block)
    print(seen * 8 / (time.monotonic() - begun_s) / 1e9)
"""
_SEND = """
import socket
with socket.create_connection(("{address}", 5000)) as peer:
    peer.sendall(bytes({count}))
"""


def why_not() -> str | None:
    """Why there can be none here; None where there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    return f"{' and '.join(missing)} of iproute2 missing" if missing else None


@contextmanager
def joined() -> Iterator[float]:
    """Make both, and take them away at the end, with what runs in them.

    Yields:
        What the link carries by measurement, Gbit/s.
    """
    # A killed run leaves them.
    _remove()
    try:
        for name in NAMES:
            _ip("netns", "add", name)
        link = [f"veth-{name[-1]}" for name in NAMES]
        ends = [f"netns {name}" for name in NAMES]
        _ip("link", "add", link[0], *ends[0].split(), "type", "veth", *_peer(link[1], ends[1]))
        for name, end, address in zip(NAMES, link, ADDRESSES, strict=True):
            _ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", end, "up")
            shape = ["rate", RATE, "burst", BURST, "latency", f"{QUEUE_MS}ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", *shape)
        yield _measured_gbit_s()
    finally:
        _remove()


def _remove() -> None:
    for name in NAMES:
        subprocess.run(["ip", "netns", "delete", name], check=False, stderr=subprocess.DEVNULL)


def enter_namespace() -> None:
    """Where the environment says so, become the same program in the namespace of this rank."""
    if os.environ.pop(VARIABLE, None) is None:
        return
    config = json.loads(os.environ["TF_CONFIG"])
    workers = config["cluster"]["worker"]
    config["cluster"]["worker"] = [
        f"{address}:{worker.rpartition(':')[2]}"
        for address, worker in zip(ADDRESSES, workers, strict=True)
    ]
    os.environ["TF_CONFIG"] = json.dumps(config)
    name = NAMES[config["task"]["index"]]
    command = ["ip", "netns", "exec", name, sys.executable, *sys.argv]
    os.execvp("ip", command)  # noqa: S606 - an argument vector, no shell


def _measured_gbit_s() -> float:
    inside = [["ip", "netns", "exec", name, sys.executable, "-c"] for name in NAMES]
    receive = _RECEIVE.format(address=ADDRESSES[0])
    send = _SEND.format(address=ADDRESSES[0], count=_PROBE_BYTES)
    with subprocess.Popen([*inside[0], receive], stdout=subprocess.PIPE, text=True) as receiver:
        try:
            for _ in range(20):
                # The receiver is still starting: it does not say when it listens.
                time.sleep(0.3)
                sent = subprocess.run([*inside[1], send], check=False, stderr=subprocess.DEVNULL)
                if sent.returncode == 0:
                    return float(receiver.communicate(timeout=10)[0])
        finally:
            receiver.kill()
    raise RuntimeError("the namespaces cannot reach each other")


def _peer(name: str, namespace: str) -> list[str]:
    return ["peer", "name", name, *namespace.split()]


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*arguments: str) -> None:
    subprocess.run(arguments, check=True)
