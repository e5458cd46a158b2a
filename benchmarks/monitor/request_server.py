"""A server of one small model whose requests are sampled, or not, as standard input says.

python benchmarks/monitor/request_server.py PORT MODELS

Each line `on` or `off` is answered by itself. Its loops do not poll, and each run counts as quick: see
benchmarks/rollout/overhead.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from stoker.serve.batching import queue
from stoker.serve.config import ServeConfig
from stoker.serve.observability import prediction_quality
from stoker.serve.process.server import Server
from stoker.serve.runtime import busy_poll

WINDOW_S = 5.0
"""Shortest window of skew, seconds: its end is part of what is measured, 60 times as often as by default."""

MIN_ROWS = 20
"""One connection brings ten sampled rows a second."""


def main() -> None:
    """Serve until standard input ends."""
    busy_poll.BUSY_POLL_S = 0.0  # it would count as CPU time of the requests
    queue.QUICK_S = 10.0
    prediction_quality.MIN_ROWS = MIN_ROWS
    port, root = int(sys.argv[1]), Path(sys.argv[2])
    config = ServeConfig(
        root=root, rest_port=port, grpc_port=0, lame_duck_s=0.0, skew_window_s=WINDOW_S
    )
    server = Server(config)
    server.start()
    server.wait_until_ready(120)
    quality = server.plane.quality
    print("ready", flush=True)
    for line in sys.stdin:
        server.plane.quality = quality if line.strip() == "on" else None
        print(line.strip(), flush=True)
    server.plane.quality = quality
    server.stop()


if __name__ == "__main__":
    main()
