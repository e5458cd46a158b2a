"""ResNet-50 served, raw tensor bodies, against the same calls in process (benchmarks/serve/gpu.py)."""

from __future__ import annotations

import json
import os

from children import FailedError, TimedOutError
from situation import ROOT, Situation

LIMIT_S = 80

SCRIPT = ROOT / "benchmarks" / "serve" / "gpu.py"

END_S = 5.0
"""Time for the server's shutdown, seconds."""


def measure(at: Situation) -> None:
    """Batch 32 first, because it has a target; results so far count when time is up."""
    out = at.work / f"serve-{os.getpid()}.json"
    sizes = [32, 1, 8, 128] if at.device == "gpu" else [at.sizes.served_batch]
    child = at.children.python(
        SCRIPT, "--batch-sizes", *map(str, sizes), "--out", out,
        "--model", "resnet50" if at.device == "gpu" else "small",
        "--seconds", str(at.sizes.served_s), "--windows", str(at.sizes.rounds),
    )  # fmt: skip
    try:
        child.done(at.left_s() - END_S)
    except (FailedError, TimedOutError):
        if not out.is_file():
            raise
    for each in json.loads(out.read_text())["rows"]:
        rates, own = each["served_rows_per_s"], each["in_process_rows_per_s"]
        how = (
            f"medians of windows in turn: {rates['median']:g} ({rates['least']:g} to {rates['most']:g}) "
            f"against {own['median']:g} images/s"
        )
        name = f"served, batch {each['batch']}, {each['body']} body"
        at.add(
            f"{name}: against the same calls in process",
            100 * each["served_share"],
            "%",
            at_least=80.0 if each["batch"] == 32 else None,
            peer="the loaded model, called in process",
            how=how,
        )
        at.add(f"{name}", rates["median"], "images/s", how=how)
