"""What its metrics cost a training: two runs in one process, in turn, one of them served and scraped.

python benchmarks/monitor/train_overhead.py [--rounds N] [--model MODEL]

Each turn of the run with metrics is scraped twice, more often than once a second, by a client in the same process. Steps
are as short as a table's, one to a call: nothing hides what is written after each. Both runs write `metrics.jsonl`. The
result is the median of the ratios of neighboring turns. Writes monitor-train.json.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import urllib.request
from contextlib import ExitStack
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
            with urllib.request.urlopen(f"http://{address}/metrics") as answer:
                answer.read()
            if over.wait(WINDOW_S / SCRAPES):
                return

    thread = threading.Thread(target=scrape)
    thread.start()
    return thread


def ratios(task: models.Task, rounds: int, folder: Path) -> list[float]:
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
        found = []
        for number in range(rounds):
            taken = {}
            for each in (plain, served) if number % 2 else (served, plain):
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
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = ratios(models.TASKS[options.model], options.rounds, Path(folder))
    quarters = statistics.quantiles(found, n=4)
    result = figure(
        "overhead of metrics on a training, scraped more than once a second",
        100 * (statistics.median(found) - 1),
        "%",
        at_most=1.0,
        how=f"{options.model}, one step a call; {options.rounds} pairs of turns in one process, "
        f"ratios {spread(found)}, middle half {quarters[0]:.4f} to {quarters[2]:.4f}",
    )
    write(RESULTS / "monitor-train.json", [result])
    return 0 if result["holds"] else 1


if __name__ == "__main__":
    sys.exit(main())
