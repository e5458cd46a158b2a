"""ResNet-50 by `stoker train` with `train.xla: true`: compiled before the first step, or cached."""

from __future__ import annotations

import experiments
from children import TimedOutError
from parts.train import show, stoker
from situation import Situation

LIMIT_S = 100

NAME = "stoker train, train.xla: true"

END_S = 15.0
"""Time for shutting down, seconds."""


def measure(at: Situation) -> None:
    """One training; its compiled programs stay in the work folder's cache for the next call."""
    folder = experiments.images(at.work / "images", at.photographs(), at.sizes)
    seconds = min(at.sizes.train_s, at.left_s() - END_S)
    try:
        line, _ = stoker(at, folder, "train.xla=true", seconds=seconds)
    except TimedOutError:
        how = "no end in its time; called again, the part goes on from its caches"
        at.add(f"ResNet-50, {NAME}", None, "images/s", how=how)
        return
    show(at, NAME, line, rate_of="stoker, XLA")
