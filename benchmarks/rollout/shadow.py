"""What shadow traffic costs the version that answers: its p99 at half of the capacity, with and without copies.

python benchmarks/rollout/shadow.py [--seconds S] [--rounds R]

One server has the same SavedModel under two names: `alone` has no rollout, that of `copied` is in a shadow stage. So a
window of one is next to a window of the other, in the same process. The load is open loop. Its generator has a
real-time priority where it may (as root): it needs a few percent of a core, and would wait for the cores that it loads.
About 4 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "serve"))

import servers
from rollout_parts import Figure, figure, spread, write_part

from stoker.loadtest.config import LoadConfig, resolved
from stoker.loadtest.generator import run_load
from stoker.loadtest.result import LoadResult
from stoker.rollout.control.controller import Event, change
from stoker.rollout.state.changes import advance, start
from stoker.rollout.state.files import StateFiles
from stoker.rollout.state.settings import RolloutSettings
from stoker.rollout.state.state import FOLDER

ROOT = Path(__file__).resolve().parents[2]

SETTINGS = RolloutSettings(stages="shadow:1000h,100", max_shift=1.0, alpha=1e-9)
VERSIONS = {"alone": (1,), "copied": (1, 2)}
"""Model -> its versions; two have a rollout."""

MAX_PERCENT = 10.0
MAX_LATE = 0.2
"""Share of the windows in which the generator may be behind its schedule; beyond it nothing was measured."""

CONNECTIONS = 8
CAPACITY_S = 5.0
"""Time of the closed loop that finds the capacity, seconds."""

LOAD_S = 300.0
"""Longest wait for the candidate, which loads at a low priority, seconds."""


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A server with both models."""

    port: int

    def load(self, model: str, *, seconds: float, rate_per_s: float | None) -> LoadResult:
        """One window.

        Raises:
            SystemExit: a request failed: the run is void.
        """
        body = json.dumps({"instances": [[0.5] * 16]}).encode()
        head = f"POST /v1/models/{model}:predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        config = LoadConfig(rate_per_s=rate_per_s, seconds=seconds, connections=CONNECTIONS)
        address = resolved("127.0.0.1", self.port, allow_remote=False)
        with at_once():
            result = run_load(config, address, [head.encode() + body], stopped=lambda: False)
        if result.errors:
            raise SystemExit(f"bench-rollout: {model}: not every answer was 200: {result.errors}")
        return result

    def copies(self) -> dict[str, float]:
        """Result -> copies that had it."""
        text = servers.post(self.port, "/monitoring/prometheus/metrics", b"")[1].decode()
        found = re.findall(
            r'^stoker_rollout_copies\{model_name="copied",result="(\w+)"\} (\S+)',
            text,
            re.MULTILINE,
        )
        return {result: float(count) for result, count in found}


@contextmanager
def at_once() -> Iterator[None]:
    """Run this thread before all others, if the system allows it; processes that it starts do not inherit that."""
    policy = os.sched_getscheduler(0)
    try:
        first = os.SCHED_FIFO | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, first, os.sched_param(os.sched_get_priority_min(os.SCHED_FIFO)))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, os.sched_param(0))


@contextmanager
def served(scratch: Path) -> Iterator[Bench]:
    """A server with the model as versions 1 and 2 of both names, and the candidate loaded in shadow."""
    made = scratch / "made"
    call = f"import models, pathlib; models.write_models(pathlib.Path({str(made)!r}))"
    path = str(ROOT / "benchmarks" / "serve")
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.append({path!r}); {call}"], check=True
    )
    exported = next((made / "mlp").glob("[0-9]*"))
    for model, versions in VERSIONS.items():
        for version in versions:
            shutil.copytree(exported, scratch / "models" / model / str(version))
    files = StateFiles(scratch / "models" / "copied" / FOLDER)
    begun = start(None, 2, serving=1, settings=SETTINGS, now_s=time.time())
    event = Event(what="bench", who="bench", why="", at_s=time.time())
    change(files, files.latest(), advance(begun, now_s=time.time()), event)
    server, _ = servers.ours(
        scratch / "models", scratch / "serve.log", cores=[servers.SERVER_CORE, servers.CLIENT_CORE]
    )
    bench = Bench(port=server.port)
    try:
        server.wait_until(lambda: servers.post(server.port, "/readyz", b"")[0] == 200)
        end_s = time.monotonic() + LOAD_S
        while not bench.copies().get("compared"):
            bench.load("copied", seconds=1.0, rate_per_s=5.0)
            if time.monotonic() > end_s:
                raise SystemExit(
                    f"bench-rollout: nothing was compared; see {scratch / 'serve.log'}"
                )
        yield bench
    finally:
        server.stop()


def p99s(bench: Bench, *, seconds: float, rounds: int) -> list[Figure]:
    """The paired ratio of the 99th percentiles."""
    capacity = bench.load("alone", seconds=CAPACITY_S, rate_per_s=None).throughput_per_s
    p99_ms: dict[str, list[float]] = {model: [] for model in VERSIONS}
    before, late = bench.copies(), 0
    for number in range(rounds):
        for model in list(VERSIONS)[:: -1 if number % 2 else 1]:
            window = bench.load(model, seconds=seconds, rate_per_s=capacity / 2.0)
            p99_ms[model].append(window.latencies.at(99.0) * 1e3)
            late += not window.kept_schedule
        sys.stderr.write(
            f"bench-rollout: p99 {p99_ms['copied'][-1]:.3f} ms, alone {p99_ms['alone'][-1]:.3f} ms\n"
        )
    after = bench.copies()
    more = {result: after[result] - before.get(result, 0.0) for result in after}
    ratios = [
        100.0 * (copied / alone - 1.0)
        for copied, alone in zip(p99_ms["copied"], p99_ms["alone"], strict=True)
    ]
    is_void = late > MAX_LATE * 2 * rounds
    return [
        figure(
            "p99 of the version that answers, under shadow traffic",
            statistics.median(ratios),
            "%",
            at_most=None if is_void else MAX_PERCENT,
            how=f"{'VOID, the machine is busy: ' if is_void else ''}more than without copies: median of {rounds} pairs of windows ({spread(ratios)} %), open loop at "
            f"{capacity / 2.0:.0f} requests a second, half of the closed loop's; {more.get('different', 0.0):.0f} different, {more.get('bad', 0.0):.0f} bad; "
            f"{late} of {2 * rounds} windows behind their schedule",
        ),
        figure(
            "Copies compared in a shadow stage",
            more["compared"] / (rounds * seconds),
            "a second",
            how=f"of {more['copied'] / (rounds * seconds):.0f} requests a second",
        ),
    ]


def main() -> None:
    """Measure, and write the part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a window")
    parser.add_argument("--rounds", type=int, default=12, help="pairs of windows")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory(prefix="stoker-bench-") as folder,
        served(Path(folder)) as bench,
    ):
        found = p99s(bench, seconds=given.seconds, rounds=given.rounds)
    write_part("shadow", found, results=given.results)


if __name__ == "__main__":
    main()
