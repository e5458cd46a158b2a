"""Ingest of 500x375 JPEG files on all cores, and its upper bound: only the check of every file."""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path

import experiments
from situation import ROOT, Situation

LIMIT_S = 80

SCRIPT = ROOT / "benchmarks" / "ingest" / "images.py"

CORES = 16
"""Number of cores for which the target holds."""


def measure(at: Situation) -> None:
    """The stage as a user runs it, from scratch; then by number of cores, and the check alone."""
    photos, cores = at.photographs(), len(os.sched_getaffinity(0))
    show_stage(at, photos, cores)
    sys.path.append(str(SCRIPT.parent))
    images = importlib.import_module("images")
    repeats = 3 if at.device == "gpu" else 1
    # All cores first: they have the target.
    found = [images.measured(photos, at.work, workers=cores, repeats=repeats)]
    check_s = images.run(images.CHECK, str(photos), "1")["check_s"]
    at.add(
        f"the bound of ingest: the check of every file alone, {cores} cores",
        cores / check_s,
        "rows/s",
        how=f"{1000 * check_s:.3g} ms of one core a file, times the cores",
    )
    at.take(images.figures(found, check_s))
    found.append(images.measured(photos, at.work, workers=1, repeats=1))
    at.take([each for each in images.figures(found, check_s) if each["unit"] == "x"])


def show_stage(at: Situation, photos: Path, cores: int) -> None:
    """`stoker ingest` of all files."""
    folder = experiments.images(at.work / f"ingest-{time.monotonic_ns()}", photos, at.sizes)
    child = at.children.stoker("ingest", folder, "--json")
    child.done(at.left_s())
    took_s = time.monotonic() - child.began_s
    stage_s = _stage_s(child.err.read_text())
    at.add(
        f"stoker ingest of {at.sizes.width}x{at.sizes.height} JPEG files on {cores} cores",
        at.sizes.photographs / stage_s,
        "rows/s",
        at_least=4000.0 if cores == CORES else None,
        how=f"{at.sizes.photographs} files in {stage_s:.3g} s of the stage, {took_s:.3g} s of the command",
    )


def _stage_s(said: str) -> float:
    """Seconds that the command reports for the stage: `+ ingest        0.4 s`."""
    (line,) = [line for line in said.splitlines() if line.startswith("+ ingest")]
    return max(0.1, float(line.split()[2]))
