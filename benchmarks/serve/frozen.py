"""What `stoker serve --freeze` gains: calls by turns on the graph as it is loaded, and on a frozen one.

python benchmarks/serve/frozen.py [--turns N] [--seconds S]

Both are called as the server calls them, in one process, with the same rows; the frozen one has the
variables' values as constants, by `--freeze`. Prints figures as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from stoker.export.callpath import LoadedModel
from stoker.serve.loading import load_checked
from stoker.serve.safety import check_model
from stoker.tune.compare import gain_of

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmarks.serve.models import write_cnn, write_mlp

SIGNATURE = "serving_default"


def speed(model: LoadedModel, rows: list[Any], seconds: float) -> float:
    """Calls a second."""
    calls, begun_s = 0, time.perf_counter()
    while (took_s := time.perf_counter() - begun_s) < seconds or not calls:
        model.run(SIGNATURE, rows)
        calls += 1
    return calls / took_s


def compared(
    name: str, write: Callable[[Path], None], *, turns: int, seconds: float
) -> dict[str, Any]:
    """How much faster the frozen graph is, and whether it answers the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "1"
        write(path)
        model, other = (
            load_checked(path, check_model(path), freeze=freeze) for freeze in (False, True)
        )
        signature = model.signatures[SIGNATURE]
        random = np.random.default_rng(0)
        rows = [
            random.random([1, *(spec.shape or ())[1:]]).astype(spec.dtype)
            for spec in signature.inputs.values()
        ]
        plain, constant = (list(each.run(SIGNATURE, rows).values()) for each in (model, other))
        same = all(np.array_equal(a, b) for a, b in zip(plain, constant, strict=True))
        pairs = []
        for turn in range(turns):
            order = [model, other] if turn % 2 else [other, model]
            found = {each: speed(each, rows, seconds) for each in order}
            pairs.append((found[model], found[other]))
        gain = gain_of(pairs)
        for each in (model, other):
            each.close()
    return {
        "name": f"frozen graph of the {name} by the loaded one, calls a second",
        "value": round(gain.ratio, 4),
        "unit": "x",
        "target": None,
        "holds": None,
        "peer": "",
        "how": f"{turns} pairs of turns of {seconds:g} s in one process, one row a call; median, 95 % "
        f"[{gain.low:.3g}, {gain.high:.3g}]; the same bits: {'yes' if same else 'no'}",
    }


def main() -> None:
    """Measure both models."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--seconds", type=float, default=0.5)
    asked = parser.parse_args()
    figures = [
        compared(name, write, turns=asked.turns, seconds=asked.seconds)
        for name, write in (("MLP", write_mlp), ("CNN", write_cnn))
    ]
    sys.stdout.write(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
