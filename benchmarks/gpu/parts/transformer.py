"""A BERT-size Transformer encoder: ours against `model.fit`, and the share of the card's peak (MFU)."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import experiments
import goodput
from parts.train import LATE_S
from situation import Situation
from timeline import Following, of_fit

LIMIT_S = 100

RUN_S = 30.0
"""Time for each training on a GPU, seconds from its process's start."""


def measure(at: Situation) -> None:
    """The peak, the peer, ours."""
    folder = experiments.texts(at.work / "texts", at.sizes)
    batch, seconds = at.sizes.texts, RUN_S if at.device == "gpu" else at.sizes.fit_s
    found = goodput.read(
        at.children.python(
            Path(__file__).parents[1] / "peak.py", at.sizes.precision, str(at.sizes.peak_s), folder
        ).done(at.left_s())
    )
    at.add(
        "measured peak of matrix products",
        found["products_per_s"] / 1e12,
        "TFLOP/s",
        how=f"{found['dtype']}, squares of {found['product_size']}",
    )
    lines = at.work / f"texts-{time.monotonic_ns()}.jsonl"
    child = at.fit("texts", folder, lines, seconds=seconds)
    child.done(min(at.left_s(), seconds + LATE_S))
    peer = of_fit(lines, began_at=child.began_at).steady()
    ours = trained(at, folder, seconds=seconds)
    for name, rate in (("model.fit", peer), ("ours", ours)):
        show(at, name, rate, found, batch=batch)
    if peer and ours:
        at.add(
            "Transformer: ours against model.fit",
            ours[0] / peer[0],
            "x",
            at_least=1.2,
            peer="model.fit, jit_compile=False",
            how=f"{ours[0]:.4g} against {peer[0]:.4g} texts/s, medians of windows, one after the other",
        )


def show(
    at: Situation,
    name: str,
    rate: tuple[float, float, float] | None,
    found: dict[str, Any],
    *,
    batch: int,
) -> None:
    """Rate and MFU of one of the two."""
    if rate is None:
        at.add(f"Transformer, {name}", None, "texts/s", how="it made too few steps in its time")
        return
    sizes = at.sizes
    at.add(
        f"Transformer, {name}",
        rate[0],
        "texts/s",
        how=f"{found['parameters'] / 1e6:.0f} M parameters, {sizes.length} tokens, batch {batch}, median of "
        f"windows ({rate[1]:.4g} to {rate[2]:.4g})",
    )
    at.add(
        f"Transformer, {name}: MFU",
        100 * rate[0] / batch * found["step_flops"] / found["products_per_s"],
        "%",
        at_least=30.0 if name == "ours" else None,
        how=f"{found['step_flops'] / 1e12:.4g} TFLOP a step (6 a weight and token, and attention), of the "
        "measured peak",
    )


def trained(at: Situation, folder: Path, *, seconds: float) -> tuple[float, float, float] | None:
    """Ours: texts per second."""
    until = time.time() + seconds
    env = at.environment(at.work / "cache") | {experiments.UNTIL: str(until)}
    child = at.children.stoker("train", folder, "--again", "--json", env=env)
    following = Following(folder / "runs", began_at=child.began_at)
    json.loads(child.done(at.left_s()))
    return following.end(batch=at.sizes.texts).steady()
