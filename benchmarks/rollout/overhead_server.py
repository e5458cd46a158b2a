"""A server in one process for `overhead.py`: its loops do not poll, and each run counts as quick.

python benchmarks/rollout/overhead_server.py PORT GRPC_PORT MODELS
"""

from __future__ import annotations

import sys
from pathlib import Path

from stoker.rollout.control.supervisor import Controllers
from stoker.rollout.routing.router import RolloutRouter
from stoker.serve.batching import queue
from stoker.serve.config import ServeConfig
from stoker.serve.process.main import run_server
from stoker.serve.runtime import busy_poll


def main() -> None:
    """Serve until the process is ended."""
    busy_poll.BUSY_POLL_S = 0.0  # it would count as CPU time of the requests
    queue.QUICK_S = (
        10.0  # else a run that the machine interrupted sends the next requests to threads
    )
    port, grpc_port, models = sys.argv[1:]
    config = ServeConfig(root=Path(models), rest_port=int(port), grpc_port=int(grpc_port))
    router = RolloutRouter(server="bench", controllers=Controllers())
    run_server(config, lambda _: None, router=router)


if __name__ == "__main__":
    main()
