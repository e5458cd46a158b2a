"""Stoker's loop against `model.fit` and a loop by hand; writes benchmarks/results/train-loop.json.

python benchmarks/train/loop.py [--processes N] [--rounds N] [--contests mlp:single cnn:many ...]

A process may be some per cent quicker or slower than the next one with the same code (where its
memory lies, which kernels were chosen), so that each contest is held in several of them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import RESULTS, Figure, figure, spread, write

Found = dict[str, Any]
"""What `contest.py` prints."""

HERE = Path(__file__).resolve().parent

TITLES = {
    "single": "1 step a call",
    "many": "20 steps a call",
    "best": "best settings of each",
    "mirrored": "2 replicas on logical devices",
}

MODELS = ("table_mlp", "mlp", "wide_mlp", "cnn", "transformer")

CONTESTS = [
    *(f"{model}:{name}" for name in ("single", "many") for model in MODELS),
    "table_mlp:best",
    "mlp:best",
    "wide_mlp:best",
    *(f"{model}:mirrored" for model in MODELS),
]

PEERS = {"fit": "model.fit", "by_hand": "a tf.function loop by hand"}

TARGETS = {"fit": 1.0, "by_hand": 0.97}
"""Peer -> how many times its time ours must be the smaller, at least."""

BEST_TARGETS = {("table_mlp", "fit"): 1.4, ("mlp", "fit"): 1.4}
"""The same of a model where each takes its best settings."""


def contest(name: str, rounds: int) -> Found:
    """One contest in a fresh process."""
    command = [sys.executable, str(HERE / "contest.py"), *name.split(":"), f"--rounds={rounds}"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    sys.stderr.write(f"{name}: {done.stdout}")
    found: Found = json.loads(done.stdout)
    return found


def figures(name: str, found: Sequence[Found]) -> list[Figure]:
    """Ratios against each peer, by wall clock and by CPU time.

    Args:
        name: Model and contest.
        found: What each process measured.
    """
    model, kind = name.split(":")
    made = []
    for peer in [peer for peer in PEERS if peer in found[0]["contestants"]]:
        title = f"{model}, {TITLES[kind]}: against {PEERS[peer]}"
        target = TARGETS[peer]
        if kind == "best":
            target = BEST_TARGETS.get((model, peer), target)
        wall, cpu = ([_ratio(each, peer, key) for each in found] for key in ("wall_s", "cpu_s"))
        how = (
            f"median of {len(found)} processes ({spread(wall)}), of each the median of "
            f"{_turns(found[0])} turns in alternation; stoker: {_shown(found, 'stoker')}; "
            f"peer: {_shown(found, peer)}"
        )
        made += [
            figure(title, statistics.median(wall), "x", at_least=target, peer=peer, how=how),
            figure(f"{title}, CPU time", statistics.median(cpu), "x", peer=peer, how=how),
        ]
    return made


def _ratio(found: Found, peer: str, key: str) -> float:
    our, their = (found["contestants"][name][key] for name in ("stoker", peer))
    return statistics.median(theirs / ours for theirs, ours in zip(their, our, strict=True))


def _turns(found: Found) -> str:
    return f"{len(found['contestants']['stoker']['wall_s'])} pairs of {found['steps']} steps"


def _shown(found: Sequence[Found], name: str) -> str:
    runs = [each["contestants"][name] for each in found]
    levers = " or ".join(dict.fromkeys(run["levers"] for run in runs))
    wall_ms = [1000 * wall_s for run in runs for wall_s in run["wall_s"]]
    loss = statistics.median(run["loss"] for run in runs)
    return (
        f"{levers}, {statistics.median(wall_ms):.3g} ms a step ({spread(wall_ms)}), loss {loss:.4f}"
    )


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--contests", nargs="+", default=CONTESTS, metavar="MODEL:CONTEST")
    parser.add_argument("--out", type=Path, default=RESULTS / "train-loop.json")
    options = parser.parse_args()
    found: dict[str, list[Found]] = {name: [] for name in options.contests}
    # Not one after the other: what the machine does for minutes hits all contests.
    for _ in range(options.processes):
        for name, each in found.items():
            each.append(contest(name, options.rounds))
    write(options.out, [shown for name, each in found.items() for shown in figures(name, each)])


if __name__ == "__main__":
    main()
