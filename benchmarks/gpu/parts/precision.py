"""ResNet-50's step in bfloat16 and in float16, with a fixed and with a dynamic loss scale."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import experiments
from children import TimedOutError
from situation import Situation

LIMIT_S = 100

SCRIPT = Path(__file__).parents[1] / "resnet_step.py"

END_S = 4.0
"""Time for killing the script, and for writing its figures, seconds."""

CHOICES = ("mixed_bfloat16", "mixed_float16:128", "mixed_float16:dynamic")
"""The candidates for `train.precision: auto`; the first one is compared with."""


def measure(at: Situation) -> None:
    """All in one process, without XLA; those that are known when time is up count."""
    sizes = at.sizes
    folder = experiments.images(at.work / "images", at.photographs(), sizes)
    choices = CHOICES if at.device == "gpu" else CHOICES[-1:]
    child = at.children.python(SCRIPT, folder, str(sizes.crop), str(sizes.batch), *choices)
    with contextlib.suppress(TimedOutError):
        child.done(at.left_s() - END_S)
    lines = [line for line in child.out.read_text().splitlines() if line.startswith("{")]
    found = {each["choice"]: each for each in map(json.loads, lines)}
    for choice in choices:
        each = found.get(choice)
        if each is None:
            at.add(f"ResNet-50, {choice}", None, "images/s", how="not reached in the part's time")
            continue
        base = found[choices[0]]["images_per_s"]
        at.add(
            f"ResNet-50, {choice}",
            each["images_per_s"],
            "images/s",
            how=f"{each['images_per_s'] / base:.3g}x of {choices[0]} (calls from {each['least']:.4g} to "
            f"{each['most']:.4g}), batches in memory; loss {each['loss']:.3g} after {each['steps']} steps",
        )
