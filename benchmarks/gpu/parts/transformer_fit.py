"""The Transformer encoder by `model.fit` without XLA: the peer of `transformer`."""

from __future__ import annotations

import time

import experiments
from parts.fit import LATE_S
from parts.transformer import run_s, show
from situation import Situation
from timeline import of_fit

LIMIT_S = 80


def measure(at: Situation) -> None:
    """Until its time is up."""
    folder = experiments.texts(at.work / "texts", at.sizes)
    lines = at.work / f"texts-{time.monotonic_ns()}.jsonl"
    child = at.fit("texts", folder, lines, seconds=run_s(at))
    child.done(min(at.left_s(), run_s(at) + LATE_S))
    rate = of_fit(lines, began_at=child.began_at).steady()
    show(at, "model.fit, jit_compile=False", rate, rate_of="fit, texts")
