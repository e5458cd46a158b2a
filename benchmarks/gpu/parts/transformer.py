"""A BERT-size Transformer encoder by `stoker train`: its speed, and the share of the card's peak (MFU).

The peer is the part `transformer_fit`; `records.derived` compares the two.
"""

from __future__ import annotations

from pathlib import Path

import experiments
import goodput
from parts.train import stoker
from situation import Situation

LIMIT_S = 100

RUN_S = 30.0
"""Time for each training on a GPU, seconds from its process's start."""

Rate = tuple[float, float, float]
"""Texts per second: median, least and most."""


def measure(at: Situation) -> None:
    """Measure `stoker train`, then the card's peak, which MFU needs."""
    folder = experiments.texts(at.work / "texts", at.sizes)
    line, found = stoker(at, folder, batch=at.sizes.texts, seconds=run_s(at))
    rate = line.steady()
    show(at, "stoker train", rate, rate_of="stoker, texts")
    peak = goodput.read(
        at.children.python(
            Path(__file__).parents[1] / "peak.py", at.sizes.precision, str(at.sizes.peak_s), folder
        ).done(at.left_s())
    )
    at.add(
        "measured peak of matrix products",
        peak["products_per_s"] / 1e12,
        "TFLOP/s",
        how=f"{peak['dtype']}, squares of {peak['product_size']}",
    )
    xla = (found.get("xla") or {}).get("why", "unknown: no end in its time")
    at.add(
        "Transformer, stoker train: MFU",
        100 * rate[0] / at.sizes.texts * peak["step_flops"] / peak["products_per_s"]
        if rate
        else None,
        "%",
        at_least=30.0,
        how=f"{peak['parameters'] / 1e6:.0f} M parameters, {peak['step_flops'] / 1e12:.4g} TFLOP a step (6 a "
        f"weight and token, and attention), of the measured peak; XLA: {xla}",
    )


def run_s(at: Situation) -> float:
    """Time for a training, seconds from its process's start."""
    return RUN_S if at.device == "gpu" else at.sizes.fit_s


def show(at: Situation, name: str, rate: Rate | None, *, rate_of: str) -> None:
    """The rate of one of the two."""
    if rate is None:
        at.add(f"Transformer, {name}", None, "texts/s", how="it made too few steps in its time")
        return
    at.add(
        f"Transformer, {name}",
        rate[0],
        "texts/s",
        rate_of=rate_of,
        how=f"{at.sizes.length} tokens, batch {at.sizes.texts}, median of windows ({rate[1]:.4g} to "
        f"{rate[2]:.4g})",
    )
