"""The server compared with its peers and with the limit, and while models are loaded and unloaded.

python benchmarks/serve/run.py [--cases mlp cnn grpc workers swap] [--peers fastapi ...] [--seconds S] [--rounds R]

The server is pinned to one core, the client to another. Each case writes
benchmarks/results/serve/<case>.json; all that are there make benchmarks/results/serve.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(
    str(ROOT / "benchmarks" / "train")
)  # `figures`; it has a `models` too, which is found after ours

import isolated  # noqa: E402 - next to this file, which is in no package

_PROGRAMS = {"wrk": "wrk", "h2load": "nghttp2-client", "taskset": "util-linux"}
"""What is called, and Debian's package of it."""


def main() -> None:
    """Run the given cases, and put all figures together."""
    parser = argparse.ArgumentParser(description=__doc__)
    cases = ("mlp", "cnn", "grpc", "workers", "swap")
    peers = ("fastapi", "kserve", "mlserver", "bentoml", "litserve", "ray")
    parser.add_argument("--cases", nargs="+", default=cases, choices=cases)
    parser.add_argument("--peers", nargs="*", default=peers, choices=peers)
    parser.add_argument("--seconds", type=int, default=2, help="of a window; wrk counts whole ones")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    missing = [f"{name} (Debian: {p})" for name, p in _PROGRAMS.items() if not shutil.which(name)]
    if missing:
        raise SystemExit(f"bench-serve: {', '.join(missing)} must be installed")
    isolated.isolate()
    _run(given)


def _run(given: argparse.Namespace) -> None:
    import grpc_case
    import models
    import rest_cases
    import swap_case
    import workers_case
    from figures import write
    from lineup import Lineup

    by_name = {
        "mlp": rest_cases.mlp,
        "cnn": rest_cases.cnn,
        "grpc": grpc_case.grpc_case,
        "workers": workers_case.workers,
        "swap": swap_case.swap,
    }
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers end with it
    parts = given.results / "serve"
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder, ExitStack() as stack:
        lineup = Lineup(scratch=Path(folder), peers=given.peers, stack=stack)
        models.write_models(lineup.root)
        for name in given.cases:
            begun_s = time.monotonic()
            figures = by_name[name](lineup, seconds=given.seconds, rounds=given.rounds)
            write(parts / f"{name}.json", figures)
            sys.stderr.write(f"bench-serve: {name} took {time.monotonic() - begun_s:.0f} s\n")
    found = [parts / f"{name}.json" for name in (*by_name, "soak")]  # `make soak` writes the last
    whole = [json.loads(path.read_text()) for path in found if path.is_file()]
    write(given.results / "serve.json", [each for part in whole for each in part])


if __name__ == "__main__":
    main()
