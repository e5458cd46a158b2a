"""ResNet-50 by `stoker train` with `train.xla: true`: compiled before the first step, or cached."""

from __future__ import annotations

import experiments
from parts.train import show, stoker
from situation import Situation

LIMIT_S = 100

NAME = "stoker train, train.xla: true"


def measure(at: Situation) -> None:
    """One training; its compiled programs stay in the work folder's cache for the next call."""
    folder = experiments.images(at.work / "images", at.photographs(), at.sizes)
    line, found = stoker(at, folder, "train.xla=true", batch=at.sizes.batch)
    if not line.marks:
        how = "no step in its time; called again, the part goes on from its caches"
        at.add(f"ResNet-50, {NAME}", None, "images/s", how=how)
        return
    show(at, NAME, line, rate_of="stoker, XLA")
    for name, count in ((found.get("xla") or {}).get("cache") or {}).items():
        at.add(
            f"compiled programs in XLA's cache: {name}", count, "files", how="stoker train --json"
        )
