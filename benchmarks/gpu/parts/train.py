"""ResNet-50 on JPEGs without XLA by `stoker train`: its speed, and where the time goes.

The peer is the part `fit`; `records.derived` compares the two.
"""

from __future__ import annotations

import time
from typing import Any

import experiments
import goodput
from children import TimedOutError
from situation import Situation
from timeline import Following, Timeline

LIMIT_S = 100

END_S = 5.0
"""Time for killing a training that has no end in its time, and for writing its figures, seconds."""

RATES = {"H200": 2500.0, "H100": 1900.0}
"""Part of the card's name -> images per second that ours must reach."""


def measure(at: Situation) -> None:
    """One training, measured from the start of its process."""
    folder = experiments.images(at.work / "images", at.photographs(), at.sizes)
    line, found = stoker(at, folder, "train.xla=false", batch=at.sizes.batch)
    show(at, "stoker train, train.xla: false", line, rate_of="stoker")
    goodput.show(at, line, found)


def stoker(
    at: Situation, folder: Any, *settings: str, batch: int, seconds: float | None = None
) -> tuple[Timeline, dict[str, Any]]:
    """`stoker train` until the first epoch that ends after this many seconds; its result.

    The earlier stages are done already (`run.py`, prepare): their time is not the training's. A
    training without an end in the part's time has a timeline, and an empty result.
    """
    runs = folder / "runs"
    until = time.time() + (seconds or at.sizes.train_s)
    env = at.environment(at.work / "cache") | {experiments.UNTIL: str(until)}
    sets = [part for setting in settings for part in ("--set", setting)]
    child = at.children.stoker("train", folder, "--again", *sets, "--json", env=env)
    following = Following(runs, began_at=child.began_at)
    try:
        found = goodput.read(child.done(at.left_s() - END_S)) | {"ended_at": time.time()}
    except TimedOutError:
        return following.end(batch=batch), {}
    # The last step of an epoch has fewer rows: what a step has on average.
    rows = found["samples_per_s"] * found["step_time_s"]
    return following.end(batch=rows), found


def show(at: Situation, name: str, line: Timeline, *, rate_of: str) -> None:
    """Rate and start of one training, and what they come to in five minutes."""
    start_s, steady = line.until_first_step_s(batch=at.sizes.batch), line.steady()
    if start_s is None or steady is None:
        at.add(f"ResNet-50, {name}", None, "images/s", how="it made no steps in its time")
        return
    rate, least, most = steady
    card = at.card_name()
    target = next((rates for key, rates in RATES.items() if key in card), None)
    at.add(
        f"ResNet-50, {name}",
        rate,
        "images/s",
        at_least=target if rate_of == "stoker" else None,
        rate_of=rate_of,
        how=f"batch {at.sizes.batch}, while it steps: median of {len(line.stepping) or 'all'} "
        f"{'calls by its own clock' if line.stepping else 'windows'} ({least:.4g} to {most:.4g})",
    )
    at.add(
        f"ResNet-50, {name}: from process start to the first step",
        start_s,
        "s",
        how="from outside; the time of later steps in the first call is taken off",
    )
    total = line.five_minutes()
    if total:
        at.add(
            f"ResNet-50, {name}: images in the first five minutes",
            total,
            "images",
            rate_of=f"{rate_of}, five minutes",
            how=f"counted for {line.marks[-1].at - line.began_at:.3g} s, then computed at the mean rate of the "
            "second half, with ends of epochs",
        )
