"""The small perceptron and CNN of benchmarks/train, best settings of each side, against `model.fit`."""

from __future__ import annotations

import statistics
from pathlib import Path

import goodput
from figures import spread
from situation import Situation

LIMIT_S = 90

MODELS = ("mlp", "cnn")


def measure(at: Situation) -> None:
    """One process per model; both sides take turns in it."""
    script = Path(__file__).parents[1] / "small.py"
    for model in MODELS if at.device == "gpu" else MODELS[:1]:
        child = at.children.python(script, model, str(at.sizes.rounds))
        found = goodput.read(child.done(at.left_s()))
        sides = found["contestants"]
        ratios = [
            theirs / ours
            for theirs, ours in zip(sides["fit"]["wall_s"], sides["stoker"]["wall_s"], strict=True)
        ]
        at.add(
            f"{model} of benchmarks/train, best settings: ours against model.fit",
            statistics.median(ratios),
            "x",
            at_least=1.5,
            peer="model.fit",
            how=f"median of {len(ratios)} pairs of {found['steps']} steps in turn ({spread(ratios)}); ours: "
            f"{sides['stoker']['levers']}; peer: {sides['fit']['levers']}",
        )
