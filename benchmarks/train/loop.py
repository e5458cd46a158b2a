"""Stoker's loop beside `model.fit` and a loop by hand; writes benchmarks/results/train-loop.json.

python benchmarks/train/loop.py [--rounds N] [--contests mlp:single cnn:many ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from figures import RESULTS, Figure, figure, spread, write

HERE = Path(__file__).resolve().parent

TITLES = {
    "single": "1 step a call",
    "many": "20 steps a call",
    "best": "best settings of each",
    "mirrored": "2 replicas on logical devices",
}

MODELS = ("mlp", "wide_mlp", "cnn", "transformer")

CONTESTS = [
    *(f"{model}:{name}" for name in ("single", "many") for model in MODELS),
    "mlp:best",
    "wide_mlp:best",
    *(f"{model}:mirrored" for model in MODELS),
]

PEERS = {"fit": "model.fit", "by_hand": "a tf.function loop by hand"}

TARGETS = {"fit": 1.0, "by_hand": 0.97}
"""Peer -> how many times its time ours must be the smaller, at least."""

BEST_TARGETS = {("mlp", "fit"): 1.4}
"""The same of a model where each takes its best settings."""


def contest(name: str, rounds: int) -> dict[str, Any]:
    """One contest in a fresh process."""
    command = [sys.executable, str(HERE / "contest.py"), *name.split(":"), f"--rounds={rounds}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    sys.stderr.write(f"{name}: {done.stdout}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def figures(name: str, found: dict[str, Any]) -> list[Figure]:
    """Ratios of medians against each peer, by wall clock and by CPU time."""
    model, kind = name.split(":")
    runs = found["contestants"]
    our = runs["stoker"]
    made = []
    for peer in [peer for peer in PEERS if peer in runs]:
        their = runs[peer]
        title = f"{model}, {TITLES[kind]}: against {PEERS[peer]}"
        how = (
            f"{len(our['wall_s'])} turns of {found['steps']} steps in alternation; stoker: "
            f"{our['levers']}, {_ms(our)}, loss {our['loss']:.4f}; peer: {their['levers']}, "
            f"{_ms(their)}, loss {their['loss']:.4f}"
        )
        target = TARGETS[peer]
        if kind == "best":
            target = BEST_TARGETS.get((model, peer), target)
        wall, cpu = (
            statistics.median(their[key]) / statistics.median(our[key])
            for key in ("wall_s", "cpu_s")
        )
        made += [
            figure(title, wall, "x", at_least=target, peer=peer, how=how),
            figure(f"{title}, CPU time", cpu, "x", peer=peer, how=how),
        ]
    return made


def _ms(run: dict[str, Any]) -> str:
    wall_ms = [1000 * wall_s for wall_s in run["wall_s"]]
    return f"{statistics.median(wall_ms):.3g} ms a step ({spread(wall_ms)})"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--contests", nargs="+", default=CONTESTS, metavar="MODEL:CONTEST")
    parser.add_argument("--out", type=Path, default=RESULTS / "train-loop.json")
    options = parser.parse_args()
    found = []
    for name in options.contests:
        found += figures(name, contest(name, options.rounds))
    write(options.out, found)


if __name__ == "__main__":
    main()
