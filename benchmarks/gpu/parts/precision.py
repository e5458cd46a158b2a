"""ResNet-50's step in bfloat16 and in float16, with a fixed and with a dynamic loss scale."""

from __future__ import annotations

import experiments
from parts.train import stoker
from situation import Situation

LIMIT_S = 100

CHOICES = {
    "bfloat16": ("train.precision=mixed_bfloat16",),
    "float16, loss scale 128": ("train.precision=mixed_float16", "train.loss_scale=128"),
    "float16, dynamic loss scale": ("train.precision=mixed_float16", "train.loss_scale=dynamic"),
}
"""What `train.precision: auto` chooses between."""


def measure(at: Situation) -> None:
    """One training each, without XLA; the first one is what the others are compared with."""
    folder = experiments.images(at.work / "images", at.photographs(), at.sizes)
    base: float | None = None
    choices = list(CHOICES.items())[0 if at.device == "gpu" else -1 :]
    for number, (name, settings) in enumerate(choices):
        share = at.left_s() / (len(choices) - number)
        line, found = stoker(at, folder, "train.xla=false", *settings, seconds=0.6 * share)
        steady = line.steady()
        if steady is None:
            at.add(f"ResNet-50, {name}", None, "images/s", how="it made too few steps in its time")
            continue
        base = base or steady[0]
        at.add(
            f"ResNet-50, {name}",
            steady[0],
            "images/s",
            how=f"{steady[0] / base:.3g}x of bfloat16 (calls from {steady[1]:.4g} to {steady[2]:.4g}); loss "
            f"{found['metrics']['loss']:.3g} after {found['steps']} steps",
        )
