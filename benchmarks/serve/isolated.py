"""A separate network namespace: some peers listen on every address, and here no other process reaches them."""

from __future__ import annotations

import os
import subprocess
import sys

_INSIDE = "STOKER_BENCH_ISOLATED"


def isolate() -> None:
    """Start this process again where the loopback device is the only one.

    Raises:
        SystemExit: this machine allows no such namespace.
    """
    if _INSIDE in os.environ:
        return
    as_root = [] if os.geteuid() == 0 else ["--map-root-user"]
    inside = ["unshare", *as_root, "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    if subprocess.run([*inside, "true"], check=False).returncode:
        raise SystemExit(
            "bench-serve: the peers need a network namespace (unshare and ip; util-linux and "
            "iproute2), and this machine allows none"
        )
    os.environ[_INSIDE] = "1"
    os.execvp(inside[0], [*inside, sys.executable, *sys.argv])  # noqa: S606 - no shell of ours
