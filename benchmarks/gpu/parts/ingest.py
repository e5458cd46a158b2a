"""Ingest of JPEG files of 500x375 on all cores, and its bound: the check of every file alone."""

from __future__ import annotations

import json
import os
import time

import experiments
from situation import ROOT, Situation

LIMIT_S = 60

SCRIPT = ROOT / "benchmarks" / "ingest" / "images.py"

CORES = 16
"""The target is for so many."""


def measure(at: Situation) -> None:
    """The stage as a user runs it, from nothing; then the check alone, where this version measures it."""
    rows = at.sizes.photographs
    cores = len(os.sched_getaffinity(0))
    folder = experiments.images(
        at.work / f"ingest-{time.monotonic_ns()}", at.photographs(), at.sizes
    )
    child = at.children.stoker("ingest", folder, "--json")
    text = child.done(at.left_s())
    took_s = time.monotonic() - child.began_s
    stage_s = _stage_s(child.err.read_text())
    at.add(
        f"ingest of {at.sizes.width}x{at.sizes.height} JPEG files on {cores} cores",
        rows / stage_s,
        "rows/s",
        at_least=4000.0 if cores == CORES else None,
        how=f"{rows} files in {stage_s:.3g} s of the stage; {took_s:.3g} s with the process's start; "
        f"{json.loads(text)['output']}",
    )


def _stage_s(said: str) -> float:
    """Seconds that the command says of the stage: `+ ingest        0.4 s`."""
    (line,) = [line for line in said.splitlines() if line.startswith("+ ingest")]
    return max(0.1, float(line.split()[2]))
