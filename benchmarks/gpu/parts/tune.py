"""`stoker tune` on the naive image script: how busy the GPU is before and after."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import goodput
from situation import ROOT, Situation

LIMIT_S = 100


def measure(at: Situation) -> None:
    """A copy of the naive recipe, without files of earlier runs, tuned within the budget."""
    leave = shutil.ignore_patterns("runs", "models", "data", "stoker.lock.yaml", "__pycache__")
    folder = Path(tempfile.mkdtemp(dir=at.work)) / "naive"
    shutil.copytree(ROOT / "recipes" / "naive", folder, ignore=leave)
    child = at.children.stoker("tune", folder, "--json", "--budget", at.sizes.budget)
    found = goodput.read(child.done(at.left_s()))
    kept = ", ".join(f"{name}={value}" for name, value in found["settings"].items()) or "nothing"
    how = f"U: what one resident batch takes over what a real step takes; budget {at.sizes.budget}; kept: {kept}"
    for when, least in (("before", None), ("after", 90.0)):
        at.add(
            f"naive image script, {when} stoker tune: speed of the resident batch",
            100 * found[when]["busy_fraction"],
            "%",
            at_least=least,
            how=how,
        )
        show_gpus(at, when, found[when])
    at.add(
        "naive image script: tuned against as it was",
        found["after"]["samples_per_s"] / found["before"]["samples_per_s"],
        "x",
        peer="the same script before",
        how=f"samples a second; {kept}",
    )


def show_gpus(at: Situation, when: str, found: dict[str, Any]) -> None:
    """NVML's readings during it."""
    for gpu in found.get("gpus") or found.get("machine", {}).get("gpus", []):
        at.add(
            f"naive image script, {when} stoker tune: GPU busy",
            100 * gpu["utilization"],
            "%",
            how="NVML's utilization, mean; a kernel that fills little of the card counts as busy",
        )
