"""The parts of `make bench-rollout`: each writes its own file, and all together are one result."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from figures import RESULTS, write

PARTS = ("overhead", "faults")
"""Names of the parts, in the order of the result."""


def write_part(name: str, figures: Sequence[dict[str, Any]], *, results: Path = RESULTS) -> None:
    """Write benchmarks/results/rollout/NAME.json, and put all parts together in rollout.json."""
    folder = results / "rollout"
    write(folder / f"{name}.json", figures)
    found = [folder / f"{part}.json" for part in PARTS]
    whole = [json.loads(path.read_text()) for path in found if path.is_file()]
    text = json.dumps([figure for part in whole for figure in part], indent=1)
    (results / "rollout.json").write_text(text + "\n")
