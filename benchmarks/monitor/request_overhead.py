"""What monitoring costs a small REST request: server CPU per request, with all of it and without, in turn.

python benchmarks/monitor/request_overhead.py [--rounds R] [--window-s S]

With it, the server is scraped once a second and samples its requests for skew and drift; the first scrape starts the
thread that reads GPUs, if there are any. Without it, it is neither scraped nor samples. Counting requests, which cannot be
turned off, is in both. One process serves both, so that a window of one is next to a window of the other. Writes
benchmarks/results/monitor_requests.json.
"""

from __future__ import annotations

import argparse
import http.client
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "rollout"))  # `turns` is this one's
sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))

import numpy as np
from figures import RESULTS, Figure, figure, write
from turns import Grpc, Rest, closing, cpu_s

from stoker.core.statistics.columns import ColumnStatistics
from stoker.core.statistics.values import statistics_of_values
from stoker.registry.training_statistics import write_training_statistics

HERE = Path(__file__).resolve().parent
METRICS = "/monitoring/prometheus/metrics"
CONNECTIONS = (1, 64)
AT_MOST = 2.0
"""Percent of a request's CPU time."""

SCRAPE_S = 1.0
"""Between two scrapes."""

WARM_TURNS, CHECKED_TURNS = 3_000, 20
"""The model has to prove that it is quick; between looks at the clock."""

SERVER_CORE = "0"
FEATURES = 16


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A server process."""

    process: subprocess.Popen[str]
    port: int

    def sample(self, word: str) -> None:
        """Let it sample requests (`on`) or not (`off`)."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word}\n")
        self.process.stdin.flush()
        if self.process.stdout.readline().strip() != word:
            raise RuntimeError("the server has ended")

    def scrape(self) -> str:
        """The answer to a scrape, as Prometheus asks for it."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", METRICS, headers={"accept-encoding": "identity"})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"a scrape was answered by {answer.status}")
        return text


def write_model(root: Path) -> None:
    """The small model of benchmarks/serve, with statistics of its training data."""
    code = (
        f"import sys; sys.path.append({str(HERE.parent / 'serve')!r}); "
        f"import models, pathlib; models.write_models(pathlib.Path({str(root)!r}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    like = ColumnStatistics(
        name="input",
        dtype="float32",
        length=FEATURES,
        count=0,
        missing=0,
        distinct=0,
        numbers=None,
        lengths=None,
        top=(),
    )
    values = np.random.default_rng(0).uniform(size=(2_000, FEATURES)).astype(np.float32)
    (version,) = (root / "mlp").glob("[0-9]*")
    write_training_statistics(version, [statistics_of_values(values, like)])


@contextmanager
def served() -> Iterator[Bench]:
    """The server, on a core of its own where there are two."""
    with tempfile.TemporaryDirectory(prefix="stoker-bench-") as scratch:
        root = Path(scratch) / "models"
        write_model(root)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = int(free.getsockname()[1])
        script = str(HERE / "request_server.py")
        command = ["taskset", "-c", SERVER_CORE, sys.executable, script, str(port), str(root)]
        with (Path(scratch) / "log").open("w") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            if process.stdout.readline().strip() != "ready":
                raise RuntimeError((Path(scratch) / "log").read_text()[-3_000:])
            yield Bench(process=process, port=port)
        finally:
            process.stdin.close()
            process.wait(timeout=60)
            process.stdout.close()


def window_us(bench: Bench, load: Rest | Grpc, *, seconds: float, scraped: bool) -> float:
    """CPU time of the server per request over some seconds, microseconds."""
    requests, began_s, begun_cpu_s = 0, time.monotonic(), cpu_s(bench.process.pid)
    next_s = began_s if scraped else float("inf")
    while time.monotonic() - began_s < seconds:
        if time.monotonic() >= next_s:
            next_s += SCRAPE_S
            bench.scrape()
        for _ in range(max(1, CHECKED_TURNS // len(load.connections))):
            load.turn()
            requests += len(load.connections)
    return (cpu_s(bench.process.pid) - begun_cpu_s) / requests * 1e6


def ratios(bench: Bench, load: Rest | Grpc, *, rounds: int, seconds: float) -> list[float]:
    """How much more CPU time a request takes with monitoring, percent, of each pair of windows."""
    found, shown_s = [], time.monotonic()
    for number in range(rounds):
        took = {}
        for word in ("on", "off") if number % 2 else ("off", "on"):
            bench.sample(word)
            took[word] = window_us(bench, load, seconds=seconds, scraped=word == "on")
        found.append(100.0 * (took["on"] / took["off"] - 1.0))
        if time.monotonic() - shown_s > 60.0:
            shown_s = time.monotonic()
            sys.stderr.write(f"bench-monitor: {number + 1} of {rounds} pairs of windows\n")
    return found


def overhead(bench: Bench, connections: int, found: Sequence[float], *, seconds: float) -> Figure:
    """The figure of a number of connections."""
    low, middle, high = statistics.quantiles(found, n=4)
    series = sum(not line.startswith("#") for line in bench.scrape().splitlines())
    return figure(
        f"monitoring on a small REST request, {connections} connection{'s' * (connections > 1)}",
        middle,
        "%",
        at_most=AT_MOST,
        how=f"server CPU per request, sampled for skew and scraped once a second ({series} series) against neither; "
        f"median of {len(found)} pairs of windows of {seconds:g} s in one process, half of them {low:.1f} to {high:.1f} %",
    )


def main() -> int:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=30, help="pairs of windows, at least 2")
    parser.add_argument("--window-s", type=float, default=2.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "monitor_requests.json")
    given = parser.parse_args()
    body = json.dumps({"instances": [[0.5] * FEATURES]}).encode()
    figures = []
    with served() as bench:
        for connections in CONNECTIONS:
            load = Rest(
                bench.port,
                ["/v1/models/mlp:predict"],
                body,
                share=0.0,
                connections=connections,
            )
            with closing(load):
                for _ in range(WARM_TURNS // connections):
                    load.turn()
                found = ratios(bench, load, rounds=given.rounds, seconds=given.window_s)
            figures.append(overhead(bench, connections, found, seconds=given.window_s))
        if "stoker_prediction_skew_ratio{" not in bench.scrape():
            raise RuntimeError("no window of skew has ended: measure for longer")
    write(given.out, figures)
    return 0 if all(each["holds"] for each in figures) else 1


if __name__ == "__main__":
    sys.exit(main())
