"""ResNet-50's step in bfloat16 and in float16, with a fixed and with a dynamic loss scale."""

from __future__ import annotations

import experiments
import goodput
from parts.train import stoker
from situation import ROOT, Situation

from stoker.measure.kernel_class import batch_norm_kernels

LIMIT_S = 100

CHILD = ROOT / "tests" / "gpu" / "train" / "batch_norm_child.py"
"""Trains a small network and prints the names of the device's kernels."""

END_S = 15.0
"""Time for shutting down, seconds."""

CHOICES = {
    "bfloat16": ("train.precision=mixed_bfloat16",),
    "float16, loss scale 128": ("train.precision=mixed_float16", "train.loss_scale=128"),
    "float16, dynamic loss scale": ("train.precision=mixed_float16", "train.loss_scale=dynamic"),
}
"""The candidates for `train.precision: auto`."""


def measure(at: Situation) -> None:
    """One training each, without XLA; the others are compared with the first one."""
    show_kernels(at)
    folder = experiments.images(at.work / "images", at.photographs(), at.sizes)
    base: float | None = None
    choices = list(CHOICES.items())[0 if at.device == "gpu" else -1 :]
    for number, (name, settings) in enumerate(choices):
        share_s = at.left_s() / (len(choices) - number)
        seconds = min(at.sizes.train_s, share_s - END_S)
        line, found = stoker(at, folder, "train.xla=false", *settings, seconds=seconds)
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


def show_kernels(at: Situation) -> None:
    """Whether cuDNN's kernel without transposes computes BatchNormalization, by its name in a trace."""
    name = "BatchNormalization by cuDNN's kernel for NHWC"
    precision = at.sizes.precision
    child = at.children.python(CHILD, precision, at.work / "trace")
    result = goodput.read(child.done(at.left_s()))
    found = batch_norm_kernels(result["kernels"])
    least = 1.0 if at.device == "gpu" else None
    at.add(name, float(found.is_persistent), "of 1", at_least=least, how=found.text())
