"""ResNet-50 on JPEGs without XLA by `model.fit`, with the input of TensorFlow's guides: the peer of `train`."""

from __future__ import annotations

import time

from parts.train import show
from situation import Situation
from timeline import of_fit

LIMIT_S = 90

LATE_S = 60.0
"""Longest overrun of `model.fit`, seconds, if its first step takes longer than its time."""


def measure(at: Situation) -> None:
    """Until some seconds after its first step."""
    sizes = at.sizes
    lines = at.work / f"fit-{time.monotonic_ns()}.jsonl"
    paths = [str(path) for path in at.records()]
    child = at.fit(
        "images", at.work / "images", lines, "--after", str(sizes.after_s), "--records", *paths,
        seconds=sizes.fit_s,
    )  # fmt: skip
    child.done(min(at.left_s(), sizes.fit_s + LATE_S))
    line = of_fit(lines, began_at=child.began_at)
    show(at, "model.fit, jit_compile=False", line, rate_of="fit")
