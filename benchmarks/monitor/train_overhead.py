"""What its metrics cost a training: two runs in one process, in turn, one of them served and scraped.

python benchmarks/monitor/train_overhead.py [--rounds N] [--model MODEL] [--minutes M]

Each turn of the run with metrics is scraped twice, more often than once a second, by a client in the same process. Steps
are as short as a table's, one to a call: nothing hides what is written after each. Both runs write `metrics.jsonl`. The
result is the median of the ratios of neighboring turns. Writes monitor_train.json. It ends after some minutes with the rounds
that it has; where a run does not move any more, with the stack of each thread.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import statistics
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from dataclasses import dataclass
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

WINDOW_S = 0.8
"""About how long a turn is."""

SCRAPES = 2
"""In each turn of the run with metrics."""

WARM_UP_STEPS = 200

TELL_S = 60.0
"""Between two lines that say how far it is."""

HANGS_S = 120.0
"""Longest for the start and the turn during which the time is over."""

LEAST_ROUNDS = 2
"""Quartiles need two."""


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


def scraping(address: str, over: threading.Event) -> threading.Thread:
    """Scrape some times during a turn."""

    def scrape() -> None:
        for _ in range(SCRAPES):
            with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as answer:
                answer.read()
            if over.wait(WINDOW_S / SCRAPES):
                return

    thread = threading.Thread(target=scrape)
    thread.start()
    return thread


@dataclass
class Clock:
    """Says once a minute how far the measurement is, and when its time is over."""

    minutes: float
    rounds: int

    def __post_init__(self) -> None:
        self.end_s = time.monotonic() + 60.0 * self.minutes
        self._told_s = time.monotonic()

    def goes_on(self, done: int) -> bool:
        """Whether there is another round after so many."""
        if time.monotonic() - self._told_s > TELL_S:
            self._told_s = time.monotonic()
            self.tell(f"{done} of {self.rounds} pairs of turns")
        is_late = time.monotonic() > self.end_s and done >= LEAST_ROUNDS
        return done < self.rounds and not is_late

    def tell(self, line: str) -> None:
        """Write a line."""
        sys.stderr.write(f"bench-monitor: {line}\n")


def ratios(task: models.Task, clock: Clock, folder: Path) -> list[float]:
    """Time with metrics over time without, of each pair of turns."""
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
        clock.tell(f"{steps} steps a turn")
        found = list[float]()
        while clock.goes_on(len(found)):
            taken = {}
            for each in (plain, served) if len(found) % 2 else (served, plain):
                over = threading.Event()
                client = scraping(target["targets"][0], over) if each is served else None
                taken[each] = each.advance(steps).wall_s
                over.set()
                if client is not None:
                    client.join()
            found.append(taken[served] / taken[plain])
        for each in (plain, served):
            each.stop()
    return found


def main() -> int:
    """Measure, and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--model", choices=sorted(models.TASKS), default="table_mlp")
    parser.add_argument("--minutes", type=float, default=3.0, help="most time for the rounds")
    parser.add_argument("--out", type=Path, default=RESULTS / "monitor_train.json")
    options = parser.parse_args()
    faulthandler.dump_traceback_later(60.0 * options.minutes + HANGS_S, exit=True)
    clock = Clock(options.minutes, options.rounds)
    with tempfile.TemporaryDirectory() as folder:
        found = ratios(models.TASKS[options.model], clock, Path(folder))
    faulthandler.cancel_dump_traceback_later()
    quarters = statistics.quantiles(found, n=4)
    result = figure(
        "overhead of metrics on a training, scraped more than once a second",
        100 * (statistics.median(found) - 1),
        "%",
        at_most=1.0,
        how=f"{options.model}, one step a call; {len(found)} pairs of turns in one process, "
        f"ratios {spread(found)}, middle half {quarters[0]:.4f} to {quarters[2]:.4f}",
    )
    write(options.out, [result])
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
