"""What a scrape of a server with many models costs, and what requests notice of it.

python benchmarks/monitor/scrape.py [--rounds R]

Writes benchmarks/results/monitor_scrape.json.
"""

from __future__ import annotations

import argparse
import gzip
import http.client
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))

from figures import RESULTS, Figure, figure, spread, write

HERE = Path(__file__).resolve().parent
PATH = "/monitoring/prometheus/metrics"
BODY = b'{"instances": [[1.0]]}'
REQUESTS = 2_000
"""Requests of a window."""

SCRAPES = 2
"""Scrapes that are complete within a window."""

FEW, MANY, VERSIONS = 200, 1_000, 2
CPU_S = {FEW: 0.3, MANY: 1.5}
"""Models -> most CPU time of a scrape, seconds."""

PLAIN_MB, PACKED_MB, P99_MS = 5.0, 1.0, 5.0
FLOOD_PER_S, FLOOD_PERCENT = 100, 5.0
FLOODER = """
import sys, threading, time
from http.client import HTTPConnection
port, path, per_s, threads = int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), 20
def scrape():
    next_s = time.monotonic()
    while True:
        time.sleep(max(0.0, next_s - time.monotonic()))
        next_s += threads / per_s
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", path)
        connection.getresponse().read()
        connection.close()
for _ in range(threads):
    threading.Thread(target=scrape).start()
print("begun", flush=True)
"""
SCRAPER = """
import sys
from http.client import HTTPConnection
connection = HTTPConnection("127.0.0.1", int(sys.argv[1]), timeout=60)
print("begun", flush=True)
while True:
    connection.request("GET", sys.argv[2], headers={"accept-encoding": "gzip"})
    connection.getresponse().read()
    print("scraped", flush=True)
"""


@dataclass(kw_only=True)
class Served:
    """A server process."""

    process: subprocess.Popen[str]
    port: int

    def cpu_s(self) -> float:
        """CPU time of all its threads, seconds."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def scrape(self, *, accept: str) -> bytes:
        """The body of a scrape, as it is sent."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", PATH, headers={"accept-encoding": accept})
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != 200:
            raise RuntimeError(f"a scrape was answered by {answer.status}")
        return body

    def requests_ms(self, *, while_: Callable[[], bool]) -> list[float]:
        """The time of each of many small REST requests on one connection, milliseconds."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        took_ms: list[float] = []
        while len(took_ms) < REQUESTS or while_():
            began_s = time.perf_counter()
            connection.request("POST", "/v1/models/small:predict", BODY)
            answer = connection.getresponse()
            answer.read()
            took_ms.append((time.perf_counter() - began_s) * 1e3)
            if answer.status != 200:
                raise RuntimeError(f"a request was answered by {answer.status}")
        connection.close()
        return took_ms


@contextmanager
def serving(models: int) -> Iterator[Served]:
    """A server with the counts of so many models."""
    with tempfile.TemporaryDirectory(prefix="stoker-scrape-") as folder:
        command = [
            sys.executable,
            str(HERE / "scrape_server.py"),
            str(models),
            str(VERSIONS),
            folder,
        ]
        with (Path(folder) / "log").open("w") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield Served(process=process, port=int(process.stdout.readline()))
        finally:
            process.stdin.close()
            process.wait(timeout=60)
            process.stdout.close()


def costs(served: Served, models: int, *, rounds: int) -> list[Figure]:
    """CPU time and size of scrapes alone."""
    name = f"{models:,} models x {VERSIONS} versions"
    plain, packed = served.scrape(accept="identity"), served.scrape(accept="gzip")
    took_s = []
    for _ in range(rounds):
        began_s = served.cpu_s()
        for _ in range(3):
            served.scrape(accept="gzip")
        took_s.append((served.cpu_s() - began_s) / 3)
    lines = gzip.decompress(packed).count(b"\n")
    how = (
        f"CPU time of the server's process for a scrape with gzip of {lines:,} lines; median of "
        f"{rounds} rounds of 3 ({spread(took_s)})"
    )
    cpu = figure(
        f"{name}: CPU of a scrape",
        round(statistics.median(took_s), 4),
        "s",
        at_most=CPU_S[models],
        how=how,
    )
    at_most = PLAIN_MB if models == FEW else None
    size = figure(
        f"{name}: size",
        round(len(plain) / 1e6, 3),
        "MB",
        at_most=at_most,
        how="without compression",
    )
    at_most = PACKED_MB if models == MANY else None
    small = figure(
        f"{name}: size with gzip",
        round(len(packed) / 1e6, 3),
        "MB",
        at_most=at_most,
        how="as it is sent",
    )
    return [cpu, size, small]


def percentile(values: list[float], share: float) -> float:
    """The value below which a share of the values lie."""
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def p99_during_scrapes(served: Served) -> tuple[float, int]:
    """The 99th percentile of requests while one scrape follows the other, and the number of scrapes."""
    command = [sys.executable, "-c", SCRAPER, str(served.port), PATH]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as scraper:
        assert scraper.stdout is not None
        output = scraper.stdout
        done: list[str] = []
        output.readline()
        reader = threading.Thread(target=lambda: done.extend(output), daemon=True)
        reader.start()
        took_ms = served.requests_ms(while_=lambda: len(done) < SCRAPES)
        scraper.kill()
        reader.join()
    return percentile(took_ms, 0.99), len(done)


def noticed(served: Served, models: int, *, rounds: int) -> list[Figure]:
    """Times of requests without scrapes and while one scrape follows the other, in turn."""
    served.requests_ms(while_=lambda: False)  # the model has to prove that it is quick
    alone, during, scrapes = [], [], 0
    for _ in range(rounds):
        alone.append(percentile(served.requests_ms(while_=lambda: False), 0.99))
        p99_ms, count = p99_during_scrapes(served)
        during.append(p99_ms)
        scrapes += count
    how = (
        f"at least {REQUESTS:,} small REST requests on one connection while one scrape of all models follows the "
        f"other ({scrapes} scrapes); median of {rounds} rounds, in turn with those without"
    )
    name = f"{models:,} models x {VERSIONS} versions: p99 of requests"
    more = [after - before for before, after in zip(alone, during, strict=True)]
    return [
        figure(
            f"{name}, more during scrapes than without",
            statistics.median(more),
            "ms",
            at_most=P99_MS,
            how=f"median of the differences of {rounds} pairs ({spread(more)})",
        ),
        figure(
            f"{name} during scrapes",
            statistics.median(during),
            "ms",
            at_most=P99_MS,
            how=f"{how} ({spread(during)})",
        ),
        figure(
            f"{name} without scrapes",
            statistics.median(alone),
            "ms",
            how=f"the other half of the rounds ({spread(alone)})",
        ),
    ]


def flooded(served: Served, *, rounds: int) -> Figure:
    """The 99th percentile of requests while 100 scrapes come in a second, over that without them."""
    ratios = []
    for number in range(rounds):
        took = {}
        for is_flood in (True, False) if number % 2 else (False, True):
            with scrape_flood(served.port) if is_flood else nullcontext():
                took[is_flood] = percentile(served.requests_ms(while_=lambda: False), 0.99)
        ratios.append(100.0 * (took[True] / took[False] - 1.0))
    return figure(
        f"{FLOOD_PER_S} scrapes a second: more p99 of requests",
        statistics.median(ratios),
        "%",
        at_most=FLOOD_PERCENT,
        how=f"{REQUESTS:,} small REST requests on one connection of a server of one model; median of {rounds} pairs in "
        f"turn ({spread(ratios)} %); each scrape on a connection of its own",
    )


@contextmanager
def scrape_flood(port: int) -> Iterator[None]:
    """Another process scrapes."""
    command = [sys.executable, "-c", FLOODER, str(port), PATH, str(FLOOD_PER_S)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as flooder:
        assert flooder.stdout is not None
        flooder.stdout.readline()
        try:
            yield
        finally:
            flooder.kill()


def main() -> None:
    """Measure, and write the figures."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--out", type=Path, default=RESULTS / "monitor_scrape.json")
    given = arguments.parse_args()
    rounds = given.rounds
    found: list[Figure] = []
    for models in (FEW, MANY):
        with serving(models) as served:
            found += costs(served, models, rounds=rounds)
            if models == MANY:
                found += noticed(served, models, rounds=rounds)
    with serving(1) as served:
        served.requests_ms(while_=lambda: False)
        found.append(flooded(served, rounds=rounds))
    write(given.out, found)


if __name__ == "__main__":
    main()
