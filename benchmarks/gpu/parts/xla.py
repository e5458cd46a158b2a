"""ResNet-50 by `model.fit(jit_compile=True)`, warmed up; and ours with XLA by name.

Compiling took more than 110 s on an H200, so one call may end without a step. What was tuned and compiled
until then is kept in the work folder: call the part again.
"""

from __future__ import annotations

import os
from pathlib import Path

import experiments
from children import TimedOutError
from parts.train import show, stoker
from situation import Situation
from timeline import of_fit

LIMIT_S = 100

OURS_S = 30.0
"""Time that is left for ours, seconds."""


def measure(at: Situation) -> None:
    """The peer first: its rate decides a target. Ours follows if its time is enough."""
    sizes = at.sizes
    folder = experiments.images(at.work / "images", at.photographs(), sizes)
    lines = at.work / f"fit-jit-{os.getpid()}.jsonl"
    paths = [str(path) for path in at.records()]
    os.environ.update(caches(at.work / "xla"))
    seconds = at.left_s() - 10 - (OURS_S if at.device == "gpu" else 10)
    child = at.fit(
        "images", folder, lines, "--jit", "--records", *paths,
        seconds=sizes.fit_s if at.device == "cpu" else seconds,
    )  # fmt: skip
    try:
        child.done(seconds + 10)
    except TimedOutError:
        at.add(
            "ResNet-50, model.fit, jit_compile=True",
            None,
            "images/s",
            how=f"no end within {seconds:.0f} s: it compiles; the part goes on from its caches when called again",
        )
        return
    peer = of_fit(lines, began_at=child.began_at)
    show(at, "model.fit, jit_compile=True", peer, rate_of="fit, XLA")
    if at.left_s() < OURS_S and at.device == "gpu":
        return
    ours, _ = stoker(at, folder, "train.xla=true", seconds=min(sizes.train_s, at.left_s() - 15))
    show(at, "stoker train, train.xla: true", ours, rate_of="stoker, XLA")


def caches(folder: Path) -> dict[str, str]:
    """XLA's own caches for the peer, as Stoker has them for itself."""
    tuning, programs = folder / "tuning", folder / "programs"
    for each in (tuning, programs):
        each.mkdir(parents=True, exist_ok=True)
    flags = {
        "XLA_FLAGS": f"--xla_gpu_per_fusion_autotune_cache_dir={tuning}",
        "TF_XLA_FLAGS": f"--tf_xla_persistent_cache_directory={programs}",
    }
    return {name: f"{os.environ.get(name, '')} {flag}".strip() for name, flag in flags.items()}
