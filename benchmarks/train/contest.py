"""One contest in a process of its own: `contest.py MODEL CONTEST [--rounds N]`; JSON on stdout."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import models
from contestants import CONTESTANTS, Contest, Levers
from turns import Contestant, Cost

from stoker.train.setup.strategy import make_distribution, one_device

WINDOW_S = 0.6
"""About how long a turn is: long against a scheduler's slice, short against what a machine does."""

CHOICE_ROUNDS = 3
"""Turns of each candidate before the best of a contestant is chosen."""

MANY = Levers(steps_per_call=20)
BEST = [
    Levers(steps_per_call=steps, xla=xla, precision=precision)
    for steps, xla, precision in itertools.product(
        (50, 200), (False, True), ("float32", "mixed_bfloat16")
    )
]

CONTESTS: dict[str, dict[str, list[Levers]]] = {
    "single": {name: [Levers()] for name in CONTESTANTS},
    "many": {name: [MANY] for name in CONTESTANTS},
    "best": dict.fromkeys(CONTESTANTS, BEST),
    "mirrored": {
        "stoker": [Levers(steps_per_call=20, xla=xla) for xla in (False, True)],
        # Several steps a call and XLA it refuses there.
        "fit": [Levers()],
        "by_hand": [Levers(), MANY],
    },
}
"""Contest -> contestant -> the settings of which its best is taken."""


@dataclass
class Entrant:
    """A contestant with one candidate of its settings."""

    name: str
    levers: Levers
    model: keras.Model
    contestant: Contestant


def entrants(contest: Contest, wanted: Mapping[str, list[Levers]]) -> list[Entrant]:
    """All candidates, warmed up: traced, compiled, and past their second call."""
    made = []
    for name, candidates in wanted.items():
        for levers in candidates:
            model, loop = CONTESTANTS[name](contest, levers)
            entrant = Entrant(name, levers, model, Contestant(loop))
            made.append(entrant)
    most = max(entrant.levers.steps_per_call for entrant in made)
    for entrant in made:
        entrant.contestant.advance(2 * most)
    return made


def window_steps(made: list[Entrant]) -> int:
    """Steps of a turn: the same for all, complete calls of each."""
    most = max(entrant.levers.steps_per_call for entrant in made)
    step_s = min(entrant.contestant.advance(most).wall_s for entrant in made) / most
    return max(1, round(WINDOW_S / step_s / most)) * most


def best_of_each(made: list[Entrant], steps: int) -> list[Entrant]:
    """The quickest candidate of each contestant; the others end."""
    wall_s: dict[int, list[float]] = {id(entrant): [] for entrant in made}
    for _ in range(CHOICE_ROUNDS):
        for entrant in made:
            wall_s[id(entrant)].append(entrant.contestant.advance(steps).wall_s)
    chosen = []
    for _, group in itertools.groupby(made, key=lambda entrant: entrant.name):
        quickest, *others = sorted(group, key=lambda e: statistics.median(wall_s[id(e)]))
        for each in (quickest, *others):
            ms = 1000 * statistics.median(wall_s[id(each)]) / steps
            sys.stderr.write(f"{each.name}, {each.levers}: {ms:.3g} ms a step\n")
        chosen.append(quickest)
        for other in others:
            other.contestant.stop()
    return chosen


def run(contest: Contest, wanted: Mapping[str, list[Levers]], rounds: int) -> dict[str, Any]:
    """Turns of the best of each contestant."""
    made = entrants(contest, wanted)
    steps = window_steps(made)
    if len(made) > len(wanted):
        made = best_of_each(made, steps)
    costs: dict[str, list[Cost]] = {entrant.name: [] for entrant in made}
    for number in range(rounds):
        # The order changes, so that none always follows the same one.
        for entrant in made if number % 2 else reversed(made):
            costs[entrant.name].append(entrant.contestant.advance(steps))
    for entrant in made:
        entrant.contestant.stop()
    losses = {e.name: models.mean_loss(e.model, contest.batches) for e in made}
    if max(losses.values()) - min(losses.values()) > contest.task.tolerance:
        raise RuntimeError(f"equally many steps must lead to the same loss: {losses}")
    return {
        "steps": steps,
        "contestants": {
            entrant.name: {
                "levers": str(entrant.levers),
                "loss": losses[entrant.name],
                "wall_s": [cost.wall_s / steps for cost in costs[entrant.name]],
                "cpu_s": [cost.cpu_s / steps for cost in costs[entrant.name]],
            }
            for entrant in made
        },
    }


def main() -> None:
    """Run one contest."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=models.TASKS)
    parser.add_argument("contest", choices=CONTESTS)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    two = options.contest == "mirrored"
    distribution = make_distribution("mirrored", replicas=2) if two else one_device()
    task = models.TASKS[options.model]
    with tempfile.TemporaryDirectory() as folder:
        contest = Contest(
            task=task,
            batches=models.make_batches(task),
            distribution=distribution,
            folder=Path(folder),
        )
        found = run(contest, CONTESTS[options.contest], options.rounds)
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
