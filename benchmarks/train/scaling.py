"""Two workers on two cores against one on one core; writes benchmarks/results/train-scaling.json.

python benchmarks/train/scaling.py [--rounds N] [--without-network]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import namespaces
from figures import RESULTS, Figure, figure, spread, write
from scaling_cases import CASES, OURS_5M, OVER_NETWORK, STOCK_5M, Case

from stoker.cluster.launch import LaunchSettings, launch
from stoker.cluster.limits import THREADS

WORKER = Path(__file__).resolve().with_name("scaling_worker.py")

ENOUGH_MS = 75.0
"""Compute per MB reduced from which on two workers must be nearly twice as quick."""

Rounds = dict[str, list[float]]
"""Case -> seconds a step, by round."""


def one_worker(cases: Sequence[Case]) -> dict[str, float]:
    """On the first core alone."""
    core = min(os.sched_getaffinity(0))
    environ = os.environ | dict.fromkeys(THREADS, "1")
    with tempfile.TemporaryDirectory() as folder:
        argv = ["taskset", "-c", str(core), *_argv(folder, cases)]
        subprocess.run(argv, check=True, env=environ, stdout=sys.stderr)
        return json.loads((Path(folder) / "results.json").read_text())


def two_workers(cases: Sequence[Case], *, in_namespaces: bool = False) -> dict[str, float]:
    """By Stoker's launcher, each with a core of its own."""
    environ = os.environ | ({namespaces.VARIABLE: "1"} if in_namespaces else {})
    with tempfile.TemporaryDirectory() as folder:
        launch(
            _argv(folder, cases),
            settings=LaunchSettings(workers=2, pin=True, max_restarts=0),
            log=lambda line: print(line, file=sys.stderr),
            on_beat=lambda _: None,
            environ=environ,
        )
        return json.loads((Path(folder) / "results.json").read_text())


def _argv(folder: str, cases: Sequence[Case]) -> list[str]:
    return [sys.executable, str(WORKER), folder, json.dumps([case.name for case in cases])]


def add(rounds: Rounds, found: dict[str, float], label: str) -> None:
    """Keep a round."""
    print(f"{label}: {found}", file=sys.stderr)
    for name, step_s in found.items():
        rounds[name].append(step_s)


def speedup(case: Case, one: Rounds, two: Rounds, *, link: str = "") -> Figure:
    """How many times the samples of one worker two of them get through."""
    pairs = zip(one[case.name], two[case.name], strict=True)
    found = [2 * alone / together for alone, together in pairs]
    compute_ms = 1000 * statistics.median(one[case.name]) / case.sent_mb
    target = None
    if not link:
        target = 1.85 if case.in_sweep and compute_ms >= ENOUGH_MS else None
        target = 1.6 if case is OURS_5M else target
    how = (
        f"{case.parameters / 1e6:.2f} M parameters, {case.rows} samples a worker and step, "
        f"{case.sent_mb:.2f} MB reduced, {compute_ms:.3g} ms of one core per MB; "
        f"{len(found)} rounds, {spread(found)}"
    )
    name = f"2 workers{link}: {case.name}"
    made = figure(name, statistics.median(found), "x 1 worker", at_least=target, how=how)
    if case.in_sweep and not link:
        made["at"] = float(f"{compute_ms:.4g}")
    return made


def against_stock(two: Rounds, *, link: str = "") -> Figure:
    """What two workers get through with our loop, against two with the stock one."""
    found = [
        (OURS_5M.rows / ours_s) / (STOCK_5M.rows / stock_s)
        for ours_s, stock_s in zip(two[OURS_5M.name], two[STOCK_5M.name], strict=True)
    ]
    return figure(
        f"2 workers{link}: {OURS_5M.name}, samples against the stock loop",
        statistics.median(found),
        "x",
        peer="stock",
        how="peer: MultiWorkerMirroredStrategy and a tf.function by hand, float32, no accumulation; "
        f"same run, {len(found)} rounds, {spread(found)}",
    )


def over_network(one: Rounds, rounds: int) -> list[Figure]:
    """Two workers in two namespaces, or one line that says why not."""
    if (why := namespaces.why_not()) is not None:
        print(f"the shaped network is skipped: {why}", file=sys.stderr)
        return []
    two: Rounds = defaultdict(list)
    with namespaces.joined() as gbit_s:
        for number in range(rounds):
            found = two_workers(OVER_NETWORK, in_namespaces=True)
            add(two, found, f"round {number + 1}, 2 workers over {gbit_s:.2f} Gbit/s")
    link = f" over {gbit_s:.2f} Gbit/s"
    alone = {name: step_s[:rounds] for name, step_s in one.items()}
    made = [speedup(case, alone, two, link=link) for case in OVER_NETWORK]
    return [*made, against_stock(two, link=link)]


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--without-network", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULTS / "train-scaling.json")
    options = parser.parse_args()
    one: Rounds = defaultdict(list)
    two: Rounds = defaultdict(list)
    for number in range(options.rounds):
        add(one, one_worker(CASES), f"round {number + 1}, 1 worker")
        add(two, two_workers(CASES), f"round {number + 1}, 2 workers")
    found = [speedup(case, one, two) for case in CASES]
    found.append(against_stock(two))
    if not options.without_network:
        found += over_network(one, rounds=1)
    write(options.out, found)


if __name__ == "__main__":
    main()
