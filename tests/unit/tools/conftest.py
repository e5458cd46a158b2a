"""The GPU suite's modules lie in no package: they are found by their folder."""

from __future__ import annotations

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"

for _name in ("images", "train", "gpu"):
    sys.path.insert(0, str(BENCHMARKS / _name))
