"""ResNet-50 by `model.fit(jit_compile=True)`, warmed up, with XLA's caches.

Compiling took more than 110 s on an H200, so one call may end without a step. The work folder keeps
what was tuned and compiled until then: call the part again.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import experiments
from children import TimedOutError
from parts.train import show
from situation import Situation
from timeline import of_fit

LIMIT_S = 100

NAME = "model.fit, jit_compile=True"


def measure(at: Situation) -> None:
    """Use all of the part's time if necessary; training ends seconds after its first step."""
    sizes = at.sizes
    folder = experiments.images(at.work / "images", at.photographs(), sizes)
    lines = at.work / f"fit-jit-{time.monotonic_ns()}.jsonl"
    paths = [str(path) for path in at.records()]
    seconds = at.left_s() - 8
    child = at.fit(
        "images", folder, lines, "--jit", "--after", str(sizes.after_s), "--records", *paths,
        seconds=seconds, env=caches(at.work / "xla"),
    )  # fmt: skip
    try:
        child.done(seconds + 5)
    except TimedOutError:
        how = f"no end within {seconds:.0f} s of compiling; called again, the part goes on from its caches"
        at.add(f"ResNet-50, {NAME}", None, "images/s", how=how)
        return
    show(at, NAME, of_fit(lines, began_at=child.began_at), rate_of="fit, XLA")


def caches(folder: Path) -> dict[str, str]:
    """XLA's own caches for the peer, like Stoker's own."""
    tuning, programs = folder / "tuning", folder / "programs"
    for each in (tuning, programs):
        each.mkdir(parents=True, exist_ok=True)
    flags = {
        "XLA_FLAGS": f"--xla_gpu_per_fusion_autotune_cache_dir={tuning}",
        "TF_XLA_FLAGS": f"--tf_xla_persistent_cache_directory={programs}",
    }
    return {name: f"{os.environ.get(name, '')} {flag}".strip() for name, flag in flags.items()}
