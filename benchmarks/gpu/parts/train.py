"""ResNet-50 on JPEGs, both without XLA: ours against `model.fit`, and where the time goes."""

from __future__ import annotations

import time
from typing import Any

import experiments
import goodput
from situation import Situation
from timeline import Following, Timeline, of_fit

LIMIT_S = 100

LATE_S = 60.0
"""Longest overrun of `model.fit`, seconds, if its first step takes longer than its time."""

RATES = {"H200": 2500.0, "H100": 1900.0}
"""Part of the card's name -> images per second that ours must reach."""


def measure(at: Situation) -> None:
    """Ours first, then `model.fit`; both measured from the start of their process."""
    sizes, batch = at.sizes, at.sizes.batch
    folder = experiments.images(at.work / "images", at.photographs(), sizes)
    ours, found = stoker(at, folder, "train.xla=false")
    our_start, our_rate = show(at, "stoker train, train.xla: false", ours, rate_of="stoker")
    goodput.show(at, ours, found)
    peer = fit(at)
    start, rate = show(at, "model.fit, jit_compile=False", peer, rate_of="fit")
    if rate and our_rate:
        at.add(
            "ResNet-50: ours against model.fit, both without XLA",
            our_rate / rate,
            "x",
            at_least=2.5,
            peer="model.fit, jit_compile=False",
            how=f"{our_rate:.4g} against {rate:.4g} images/s, medians of windows, one after the other",
        )
    totals = [line.five_minutes(batch=batch) for line in (ours, peer)]
    if totals[0] and totals[1]:
        at.add(
            "ResNet-50: images in the first five minutes, against model.fit",
            totals[0] / totals[1],
            "x",
            at_least=2.0,
            peer="model.fit, jit_compile=False",
            how=f"computed: the start as measured ({our_start:.3g} and {start:.3g} s), then on at the mean "
            f"rate with ends of epochs; {totals[0]:.0f} against {totals[1]:.0f}",
        )
    show_counted(at, ours, peer)


def show_counted(at: Situation, ours: Timeline, peer: Timeline) -> None:
    """Images that both had processed when the first of them ended; nothing is extrapolated."""
    if not ours.marks or not peer.marks:
        return
    shared_s = min(line.marks[-1].at - line.began_at for line in (ours, peer))
    counts = [line.samples_within(shared_s) for line in (ours, peer)]
    at.add(
        f"ResNet-50: images in the first {shared_s:.0f} s, against model.fit",
        counts[0] / counts[1] if counts[1] else None,
        "x",
        how=f"counted from the start of each process: {counts[0]:.0f} and {counts[1]:.0f}",
    )


def fit(at: Situation, *more: str, seconds: float | None = None) -> Timeline:
    """`model.fit` for this many seconds of its process."""
    lines = at.work / f"fit-{time.monotonic_ns()}.jsonl"
    seconds = seconds or at.sizes.fit_s
    paths = [str(path) for path in at.records()]
    child = at.fit(
        "images", at.work / "images", lines, "--after", str(at.sizes.after_s), "--records", *paths,
        *more, seconds=seconds,
    )  # fmt: skip
    child.done(min(at.left_s(), seconds + LATE_S))
    return of_fit(lines, began_at=child.began_at)


def stoker(
    at: Situation, folder: Any, *settings: str, seconds: float | None = None
) -> tuple[Timeline, dict[str, Any]]:
    """`stoker train` until the first epoch that ends after this many seconds; its result.

    The earlier stages are done already (`run.py`, prepare): their time is not the training's.
    """
    runs = folder / "runs"
    until = time.time() + (seconds or at.sizes.train_s)
    env = at.environment(at.work / "cache") | {experiments.UNTIL: str(until)}
    sets = [part for setting in settings for part in ("--set", setting)]
    child = at.children.stoker("train", folder, "--again", *sets, "--json", env=env)
    following = Following(runs, began_at=child.began_at)
    found: dict[str, Any] = goodput.read(child.done(at.left_s())) | {"ended_at": time.time()}
    # The last step of an epoch has fewer rows: what a step has on average.
    rows = found["samples_per_s"] * found["step_time_s"]
    return following.end(batch=rows), found


def show(
    at: Situation, name: str, line: Timeline, *, rate_of: str
) -> tuple[float | None, float | None]:
    """Start and rate of one training: seconds to the first step, images per second."""
    start_s, steady = line.until_first_step_s(batch=at.sizes.batch), line.steady()
    if start_s is None or steady is None:
        at.add(f"ResNet-50, {name}", None, "images/s", how="it made no steps in its time")
        return start_s, None
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
    return start_s, rate
