"""From process start to the first step with the default settings: cold caches, then warm ones."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from pathlib import Path

import experiments
from children import TimedOutError
from situation import Situation
from timeline import Following, Timeline

LIMIT_S = 100

COLD_S, WARM_S = 25.0, 12.0
"""Targets, seconds."""


def measure(at: Situation) -> None:
    """The same command twice; compiled programs are kept in a folder that is empty at first."""
    folder = experiments.images(at.work / "images", at.photographs(), at.sizes)
    cache = at.work / f"cold-{time.monotonic_ns()}"
    # The cold one continues for a while, so that programs compiled in the background are kept.
    for name, most_s, least_s in (("cold", COLD_S, at.sizes.start_s), ("warm", WARM_S, 0.0)):
        longest_s = (0.6 if name == "cold" else 1.0) * at.left_s() - 10
        line = started(at, folder, cache, least_s=least_s, longest_s=longest_s)
        first_s = line.until_first_step_s(batch=at.sizes.batch)
        at.add(
            f"from process start to the first step, caches {name}",
            first_s,
            "s",
            at_most=most_s,
            how="ResNet-50, stoker train with the defaults, from outside"
            if first_s is not None
            else f"no step within {longest_s:.0f} s",
        )


def started(
    at: Situation, folder: Path, cache: Path, *, least_s: float, longest_s: float
) -> Timeline:
    """One start; it ends after some steps and a minimum time, or after the longest time."""
    env = at.environment(cache)
    child = at.children.stoker("train", folder, "--again", "--json", env=env)
    following = Following(folder / "runs", began_at=child.began_at)
    while child.running() and (took_s := time.time() - child.began_at) < longest_s:
        if following.steps_seen() and took_s > least_s:
            break
        time.sleep(0.02)
    if child.running():
        # As on a preempted machine, it ends after its current step.
        child.kill(signal.SIGTERM)
    with contextlib.suppress(TimedOutError):
        child.wait(min(10.0, at.left_s()))
    line = following.end(batch=at.sizes.batch)
    # The next start also begins from scratch, and does not resume this run.
    for run in following.runs():
        shutil.rmtree(run)
    return line
