"""The parts of `make bench-rollout`: each writes its own file, and all together are one result."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "train"))  # `figures`

from figures import RESULTS, Figure, figure, spread, write

__all__ = ["RESULTS", "Figure", "figure", "spread", "write_part"]

PARTS = ("overhead", "shadow", "ab_false_alarms", "ab_scale", "faults", "answers")
"""Names of the parts, in the order of the result."""


def write_part(name: str, figures: Sequence[Figure], *, results: Path = RESULTS) -> None:
    """Write benchmarks/results/rollout/NAME.json, and put all parts together in rollout.json.

    Args:
        name: one of `PARTS`.
        figures: of the part.
        results: folder of all results.
    """
    if name not in PARTS:
        raise ValueError(f"{name!r} is not a part of the benchmark of rollouts")
    folder = results / "rollout"
    write(folder / f"{name}.json", figures)
    found = [folder / f"{part}.json" for part in PARTS]
    whole = [json.loads(path.read_text()) for path in found if path.is_file()]
    text = json.dumps([figure for part in whole for figure in part], indent=1)
    (results / "rollout.json").write_text(text + "\n")
