"""What its metrics cost a training: two runs in one process, in turn, one of them served and scraped.

python benchmarks/monitor/train_overhead.py [--rounds N] [--model MODEL]

Each turn of the run with metrics, about a second, is scraped once by a client that is a process of its own. Steps are as
short as a table's, one to a call: nothing hides what is written after each. Both runs write `metrics.jsonl`. The result is
the median of the ratios of this process's CPU time in neighboring turns, answers to scrapes included (100 pairs, 4
minutes). Writes monitor_train.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "train"))

import keras
import models
import ours
from figures import RESULTS, figure, spread, write
from turns import AfterSteps, Contestant

from stoker.telemetry.publish import Destinations, offered
from stoker.telemetry.run_info import RunInfo
from stoker.telemetry.run_time import RunTime
from stoker.telemetry.targets import live_targets
from stoker.telemetry.writers.live import LiveMetrics, Sources
from stoker.train.context.run_context import Progress

WINDOW_S = 1.0
"""About how long a turn is."""

CLIENT = """
import sys, urllib.request
for line in sys.stdin:
    with urllib.request.urlopen(f"http://{line.strip()}/metrics") as answer:
        print(len(answer.read()), flush=True)
"""
"""Scrapes an address for each line that it is given."""

WARM_UP_STEPS = 200

PROGRESS_S = 30.0
"""Between two lines of progress."""


def contestant(
    task: models.Task, folder: Path, live: LiveMetrics | None, run_time: RunTime
) -> Contestant:
    """A training process that is paused and continued by signals."""
    settings = ours.Settings(
        batch_size=task.batch_size,
        writers=() if live is None else (live,),
        run_time=run_time,
    )
    batches = models.make_batches(task)

    def make(features: dict[str, Any]) -> keras.Model:
        return models.compiled(task, features)

    built = ours.build(make, batches, settings)

    def run(after: AfterSteps) -> None:
        def tell(progress: Progress) -> None:
            if live is not None:
                live.progress(step=progress.step, steps=progress.steps, epoch=progress.epoch)
            after(progress.step)

        ours.train(built, batches, settings, folder=folder, on_progress=tell)

    return Contestant(run)


@contextmanager
def client() -> Iterator[subprocess.Popen[str]]:
    """Start the process that scrapes, and end it."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLIENT], text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        yield process
    finally:
        process.communicate()


def ratios(task: models.Task, rounds: int, folder: Path) -> list[float]:
    """CPU time with metrics over CPU time without, of each pair of turns."""
    run_time = RunTime()
    live = LiveMetrics(RunInfo(run="measured", experiment="overhead"), Sources(run_time=run_time))
    with ExitStack() as held:
        where = Destinations(runs=folder, port=0)
        held.enter_context(offered(live, where, environ={}))
        (target,) = live_targets(folder)
        plain = contestant(task, folder / "plain", None, RunTime())
        served = contestant(task, folder / "served", live, run_time)
        for each in (plain, served):
            each.advance(WARM_UP_STEPS)
        steps = round(WINDOW_S / (plain.advance(WARM_UP_STEPS).wall_s / WARM_UP_STEPS))
        served.advance(WARM_UP_STEPS)
        scraper, said_s = held.enter_context(client()), time.monotonic()
        assert scraper.stdin is not None
        assert scraper.stdout is not None
        found = []
        for number in range(rounds):
            taken = {}
            for each in (plain, served) if number % 2 else (served, plain):
                if each is served:
                    print(target["targets"][0], file=scraper.stdin, flush=True)
                taken[each] = each.advance(steps).cpu_s
                if each is served:
                    assert int(scraper.stdout.readline()) > 0
            found.append(taken[served] / taken[plain])
            if time.monotonic() - said_s > PROGRESS_S:
                said_s = time.monotonic()
                print(f"bench-monitor: pair {number + 1} of {rounds}", flush=True)
        for each in (plain, served):
            each.stop()
    return found


def main() -> int:
    """Measure, and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--model", choices=sorted(models.TASKS), default="table_mlp")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = ratios(models.TASKS[options.model], options.rounds, Path(folder))
    quarters = statistics.quantiles(found, n=4)
    result = figure(
        "CPU overhead of metrics on a training, scraped once a second",
        100 * (statistics.median(found) - 1),
        "%",
        at_most=1.0,
        how=f"{options.model}, one step a call; {options.rounds} pairs of turns in one process, "
        f"ratios {spread(found)}, middle half {quarters[0]:.4f} to {quarters[2]:.4f}",
    )
    write(RESULTS / "monitor_train.json", [result])
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
